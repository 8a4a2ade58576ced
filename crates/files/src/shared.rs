//! What the guest's operations do: to the backing directory, then to the log, in one order.

use std::ffi::{CString, OsStr};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{FileAttr, FileType, INodeNo, OpenFlags, Request, TimeOrNow, WriteFlags};
use hotspare_image::files::{FileChange, FileName, FileTime, InodeNumber, NewNode, NodeKind};
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, RenameFlags};
use nix::sys::time::TimeSpec;

use crate::error::errno_of;
use crate::log::ChangeLog;
use crate::store::{OpenFile, Store};
use crate::tree::{Kind, Tree};

/// What the FUSE threads, the cut and `apply` share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub store: Store,
    pub log: ChangeLog,
    /// Whether the guest runs here; a spare's directory is read-only to everyone but `apply`.
    pub primary: AtomicBool,
    /// Thread whose fsync is a flush of the kernel's cache only, 0 before it runs.
    pub flushing_thread: AtomicU32,
}

fn file_name(name: &OsStr) -> Result<FileName, Errno> {
    FileName::new(name.as_bytes()).ok_or(if name.len() > 255 {
        Errno::ENAMETOOLONG
    } else {
        Errno::EINVAL
    })
}

pub(crate) fn file_type(kind: Kind) -> FileType {
    match kind {
        Kind::Regular => FileType::RegularFile,
        Kind::Directory => FileType::Directory,
        Kind::Symlink => FileType::Symlink,
        Kind::Fifo => FileType::NamedPipe,
        Kind::Socket => FileType::Socket,
    }
}

fn system_time(time: FileTime) -> SystemTime {
    let nanoseconds = Duration::from_nanos(u64::from(time.nanoseconds));
    let seconds = Duration::from_secs(time.seconds.unsigned_abs());
    let whole = if time.seconds < 0 {
        UNIX_EPOCH.checked_sub(seconds)
    } else {
        UNIX_EPOCH.checked_add(seconds)
    };
    whole.and_then(|whole| whole.checked_add(nanoseconds)).unwrap_or(UNIX_EPOCH)
}

/// What utimensat(2) takes. Times before 1970 arrive from fuser 0.18 as 1970 − seconds −
/// nanoseconds where seconds are negative and nanoseconds count forward.
pub(crate) fn time_spec(time: Option<TimeOrNow>) -> TimeSpec {
    match time {
        None => TimeSpec::UTIME_OMIT,
        Some(TimeOrNow::Now) => TimeSpec::UTIME_NOW,
        Some(TimeOrNow::SpecificTime(time)) => match time.duration_since(UNIX_EPOCH) {
            Ok(after) => TimeSpec::new(after.as_secs() as i64, i64::from(after.subsec_nanos())),
            Err(before) => {
                let before = before.duration();
                let seconds = (before.as_secs() as i64).wrapping_neg();
                TimeSpec::new(seconds, i64::from(before.subsec_nanos()))
            }
        },
    }
}

/// Extended attributes that are the kernel's own business: without `FUSE_POSIX_ACL` it would not
/// act on ACLs, so they are refused.
pub(crate) fn xattr_name(name: &OsStr) -> Result<CString, Errno> {
    if name.as_bytes().starts_with(b"system.") {
        return Err(Errno::EOPNOTSUPP);
    }
    CString::new(name.as_bytes()).map_err(|_| Errno::EINVAL)
}

impl Shared {
    pub fn writable(&self) -> Result<(), Errno> {
        if self.primary.load(Ordering::Acquire) { Ok(()) } else { Err(Errno::EROFS) }
    }

    pub fn attr(&self, tree: &Tree, inode: InodeNumber) -> Result<FileAttr, Errno> {
        let node = tree.node(inode)?;
        let (stat, attributes) = self.store.attributes(tree, inode)?;
        let (size, nlink) = match node.kind {
            // As on the other host, whatever file system lies below.
            Kind::Directory if node.nameless.is_some() => (4096, 0),
            Kind::Directory => (4096, 2 + node.subdirectories),
            Kind::Regular | Kind::Symlink | Kind::Fifo | Kind::Socket => {
                (stat.st_size as u64, stat.st_nlink as u32)
            }
        };
        Ok(FileAttr {
            ino: INodeNo(inode.0),
            size,
            blocks: stat.st_blocks as u64,
            atime: system_time(attributes.accessed),
            mtime: system_time(attributes.modified),
            ctime: system_time(attributes.changed),
            crtime: UNIX_EPOCH,
            kind: file_type(node.kind),
            perm: attributes.mode as u16,
            nlink,
            uid: attributes.uid,
            gid: attributes.gid,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        })
    }

    /// Attributes for a reply that gives the kernel one more reference.
    pub fn entry(&self, tree: &Tree, inode: InodeNumber) -> Result<FileAttr, Errno> {
        let attr = self.attr(tree, inode)?;
        tree.node(inode)?.lookups.fetch_add(1, Ordering::AcqRel);
        Ok(attr)
    }

    /// `None`: no such name, which the kernel may remember.
    pub fn lookup(&self, parent: InodeNumber, name: &OsStr) -> Result<Option<FileAttr>, Errno> {
        let tree = self.store.tree();
        let found = match name.as_bytes() {
            b"." => parent,
            b".." => match tree.node(parent)?.names.first() {
                Some((above, _)) => *above,
                None => parent,
            },
            _ => match tree.child(parent, &file_name(name)?) {
                Ok(inode) => inode,
                Err(Errno::ENOENT) => return Ok(None),
                Err(error) => return Err(error),
            },
        };
        self.entry(&tree, found).map(Some)
    }

    /// Undoes `count` references of the kernel; an inode without names and references is gone.
    pub fn forget(&self, inode: InodeNumber, count: u64) {
        let unused = {
            let tree = self.store.tree();
            let Ok(node) = tree.node(inode) else {
                drop(tree);
                return self.store.tree_mut().forget_left_over(inode, count);
            };
            let less = |lookups: u64| Some(lookups.saturating_sub(count));
            let before = node.lookups.fetch_update(Ordering::AcqRel, Ordering::Acquire, less);
            before.unwrap_or_else(|lookups| lookups) <= count && node.nameless.is_some()
        };
        if unused && self.primary.load(Ordering::Acquire) {
            self.forget_unused(inode);
        }
    }

    /// Lets go of an inode if it has neither names nor references.
    pub fn forget_unused(&self, inode: InodeNumber) {
        let mut tree = self.store.tree_mut();
        let unused =
            tree.node(inode).is_ok_and(|node| node.nameless.is_some() && !node.known_to_kernel());
        if unused {
            tree.forget(inode);
            self.log.forget(inode);
        }
    }

    pub fn create(
        &self,
        request: &Request,
        parent: InodeNumber,
        name: &OsStr,
        kind: NodeKind,
        mode: u32,
    ) -> Result<(FileAttr, Option<std::fs::File>), Errno> {
        self.writable()?;
        self.log.throttle();
        let name = file_name(name)?;
        let mut tree = self.store.tree_mut();
        let parent_stat = self.store.node_fd(&tree, parent)?.stat()?;
        let (mut mode, mut gid) = (mode & 0o7777, request.gid());
        if parent_stat.st_mode & libc::S_ISGID != 0 {
            gid = parent_stat.st_gid;
            if kind == NodeKind::Directory {
                mode |= libc::S_ISGID;
            }
        }
        let inode = InodeNumber(tree.next);
        let node = NewNode { inode, kind, mode, uid: request.uid(), gid };
        let file = self.store.create(&mut tree, parent, &name, &node)?;
        self.log.record(FileChange::Create { parent, name, node }, &[inode, parent]);
        Ok((self.entry(&tree, inode)?, file))
    }

    pub fn remove(&self, parent: InodeNumber, name: &OsStr) -> Result<(), Errno> {
        self.writable()?;
        let name = file_name(name)?;
        let mut tree = self.store.tree_mut();
        let inode = self.store.remove(&mut tree, parent, &name)?;
        self.log.record(FileChange::Remove { parent, name }, &[inode, parent]);
        drop(tree);
        self.forget_unused(inode);
        Ok(())
    }

    pub fn link(
        &self,
        inode: InodeNumber,
        parent: InodeNumber,
        name: &OsStr,
    ) -> Result<FileAttr, Errno> {
        self.writable()?;
        let name = file_name(name)?;
        let mut tree = self.store.tree_mut();
        self.store.link(&mut tree, inode, parent, &name)?;
        self.log.record(FileChange::Link { inode, parent, name }, &[inode, parent]);
        self.entry(&tree, inode)
    }

    pub fn rename(
        &self,
        from: (InodeNumber, &OsStr),
        to: (InodeNumber, &OsStr),
        flags: fuser::RenameFlags,
    ) -> Result<(), Errno> {
        self.writable()?;
        if flags.contains(fuser::RenameFlags::RENAME_WHITEOUT) {
            return Err(Errno::EINVAL);
        }
        let flags = RenameFlags::from_bits_truncate(flags.bits());
        let (from_name, to_name) = (file_name(from.1)?, file_name(to.1)?);
        let mut tree = self.store.tree_mut();
        let moved = tree.child(from.0, &from_name)?;
        let exchange = flags.contains(RenameFlags::RENAME_EXCHANGE);
        let replaced =
            self.store.rename(&mut tree, (from.0, &from_name), (to.0, &to_name), flags)?;
        let change = FileChange::Rename {
            from_parent: from.0,
            from_name,
            to_parent: to.0,
            to_name,
            exchange,
        };
        let touched = [moved, from.0, to.0, replaced.unwrap_or(moved)];
        self.log.record(change, &touched);
        drop(tree);
        if let Some(replaced) = replaced {
            self.forget_unused(replaced);
        }
        Ok(())
    }

    /// Runs `work` on the open file of `inode`, in order with its other content operations.
    fn with_content<T>(
        &self,
        inode: InodeNumber,
        work: impl FnOnce(&OpenFile) -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        let open = self.store.acquire(inode, false, None)?;
        let result = {
            let _order = open.order.lock().unwrap_or_else(PoisonError::into_inner);
            work(&open)
        };
        self.store.release(inode, false);
        result
    }

    pub fn truncate(&self, inode: InodeNumber, size_bytes: u64) -> Result<(), Errno> {
        self.with_content(inode, |open| {
            open.file.set_len(size_bytes).map_err(|error| errno_of(&error))?;
            self.log.record_content(inode, FileChange::Truncate { inode, size_bytes });
            Ok(())
        })
    }

    /// Takes set-user-ID and set-group-ID away, as a write or truncation by a user without
    /// privilege does.
    pub fn kill_privileges(&self, inode: InodeNumber) -> Result<(), Errno> {
        let tree = self.store.tree();
        let fd = self.store.node_fd(&tree, inode)?;
        let mode = fd.stat()?.st_mode & 0o7777;
        let mut kept = mode & !libc::S_ISUID;
        if mode & libc::S_IXGRP != 0 {
            kept &= !libc::S_ISGID;
        }
        if kept != mode {
            fd.set_mode(kept)?;
            self.log.touch(inode);
        }
        Ok(())
    }

    pub fn write(
        &self,
        inode: InodeNumber,
        offset: u64,
        bytes: &[u8],
        write_flags: WriteFlags,
        flags: OpenFlags,
    ) -> Result<usize, Errno> {
        self.writable()?;
        self.log.throttle();
        let open = self.store.opened(inode).ok_or(Errno::EBADF)?;
        if write_flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID) {
            self.kill_privileges(inode)?;
        }
        let order = open.order.lock().unwrap_or_else(PoisonError::into_inner);
        let mut written = 0;
        let mut failed = None;
        while written < bytes.len() {
            match open.file.write_at(&bytes[written..], offset + written as u64) {
                Ok(0) => break,
                Ok(count) => written += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    failed = Some(errno_of(&error));
                    break;
                }
            }
        }
        self.log.write(inode, offset, &bytes[..written]);
        drop(order);
        match failed {
            Some(error) if written == 0 => return Err(error),
            _ => {}
        }
        if flags.0 & libc::O_DSYNC != 0 {
            open.file.sync_data().map_err(|error| errno_of(&error))?;
        }
        Ok(written)
    }

    pub fn allocate(
        &self,
        inode: InodeNumber,
        offset: u64,
        length: u64,
        mode: i32,
    ) -> Result<(), Errno> {
        self.writable()?;
        let flags = FallocateFlags::from_bits(mode).ok_or(Errno::EOPNOTSUPP)?;
        let known = FallocateFlags::FALLOC_FL_KEEP_SIZE
            | FallocateFlags::FALLOC_FL_PUNCH_HOLE
            | FallocateFlags::FALLOC_FL_ZERO_RANGE;
        if !known.contains(flags) {
            return Err(Errno::EOPNOTSUPP);
        }
        let signed = |value: u64| i64::try_from(value).map_err(|_| Errno::EFBIG);
        let (from, count) = (signed(offset)?, signed(length)?);
        self.with_content(inode, |open| {
            nix::fcntl::fallocate(&open.file, flags, from, count)?;
            let change = FileChange::Allocate { inode, offset, length, mode };
            self.log.record_content(inode, change);
            Ok(())
        })
    }

    pub fn set_xattr(
        &self,
        inode: InodeNumber,
        name: &OsStr,
        value: &[u8],
        flags: i32,
    ) -> Result<(), Errno> {
        self.writable()?;
        let name = xattr_name(name)?;
        let tree = self.store.tree();
        let fd = self.store.node_fd(&tree, inode)?;
        hotspare_kernel::set_xattr(fd, &name, value, flags)?;
        let change = FileChange::SetXattr { inode, name: name.into_bytes(), value: value.to_vec() };
        self.log.record_content(inode, change);
        Ok(())
    }

    pub fn remove_xattr(&self, inode: InodeNumber, name: &OsStr) -> Result<(), Errno> {
        self.writable()?;
        let name = xattr_name(name)?;
        let tree = self.store.tree();
        let fd = self.store.node_fd(&tree, inode)?;
        hotspare_kernel::remove_xattr(fd, &name)?;
        self.log.record_content(inode, FileChange::RemoveXattr { inode, name: name.into_bytes() });
        Ok(())
    }

    pub fn sync(
        &self,
        request: &Request,
        inode: InodeNumber,
        data_only: bool,
    ) -> Result<(), Errno> {
        // Our own flush wants the kernel's pages here, not on the disk.
        if request.pid() == self.flushing_thread.load(Ordering::Acquire) {
            return Ok(());
        }
        let open = self.store.opened(inode).ok_or(Errno::EBADF)?;
        let synced = if data_only { open.file.sync_data() } else { open.file.sync_all() };
        synced.map_err(|error| errno_of(&error))
    }
}

/// Reads until `buffer` is full or the file ends.
pub(crate) fn read_full(open: &OpenFile, buffer: &mut [u8], offset: u64) -> Result<usize, Errno> {
    let mut count = 0;
    while count < buffer.len() {
        match open.file.read_at(&mut buffer[count..], offset + count as u64) {
            Ok(0) => break,
            Ok(more) => count += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(errno_of(&error)),
        }
    }
    Ok(count)
}
