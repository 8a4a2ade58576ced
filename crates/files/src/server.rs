//! The FUSE file system over a backing directory.
//!
//! # Cache mode
//!
//! write(2) goes through: the kernel updates its cached pages *and* sends the bytes here before the
//! call returns, so the log has every write in the order the guest made them. Reads come from the
//! kernel's cache (`FOPEN_KEEP_CACHE`), names and attributes stay cached for good: nobody else
//! changes the directory, and on a spare `apply` invalidates what it changes. Pages written through
//! a shared mapping are dirty in the kernel until it writes them back, which
//! [`crate::ReplicatedDir::flush`] makes it do. The write-back cache (`FUSE_WRITEBACK_CACHE`) would make small writes
//! cheaper, but all dirty data would have to be flushed while the guest is stopped.

use std::cell::RefCell;
use std::ffi::{CString, OsStr};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{
    BsdFileFlags, FileAttr, FileHandle, FileType, FopenFlags, Generation, INodeNo, InitFlags,
    KernelConfig, LockOwner, OpenAccMode, OpenFlags, ReplyAttr, ReplyCreate, ReplyData,
    ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite,
    ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use hotspare_image::files::{FileChange, FileName, FileTime, InodeNumber, NewNode, NodeKind};
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, RenameFlags};
use nix::sys::stat::SFlag;
use nix::sys::time::TimeSpec;

use crate::error::errno_of;
use crate::log::ChangeLog;
use crate::store::{OpenFile, Store};
use crate::tree::{Kind, Tree};

/// How long the kernel may keep names and attributes: as good as for ever.
const FOR_EVER: Duration = Duration::from_secs(1 << 30);

/// Largest write the kernel sends at once, bytes (256 pages, its default limit).
const WRITE_BYTES_MAX: u32 = 1 << 20;

/// What the FUSE threads, the cut and `apply` share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub store: Store,
    pub log: ChangeLog,
    /// Whether the guest runs here; a spare's directory is read-only to everyone but `apply`.
    pub primary: AtomicBool,
    /// Thread whose fsync is a flush of the kernel's cache only, 0 if none.
    pub flushing_thread: AtomicU32,
}

/// The FUSE side of [`Shared`].
pub(crate) struct Server(pub Arc<Shared>);

thread_local! {
    static READ_BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

fn refuse(error: Errno) -> fuser::Errno {
    fuser::Errno::from_i32(error as i32)
}

fn inode(number: INodeNo) -> InodeNumber {
    InodeNumber(number.0)
}

fn file_name(name: &OsStr) -> Result<FileName, Errno> {
    FileName::new(name.as_bytes()).ok_or(if name.len() > 255 {
        Errno::ENAMETOOLONG
    } else {
        Errno::EINVAL
    })
}

fn file_type(kind: Kind) -> FileType {
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
fn time_spec(time: Option<TimeOrNow>) -> TimeSpec {
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
fn xattr_name(name: &OsStr) -> Result<CString, Errno> {
    if name.as_bytes().starts_with(b"system.") {
        return Err(Errno::EOPNOTSUPP);
    }
    CString::new(name.as_bytes()).map_err(|_| Errno::EINVAL)
}

impl Shared {
    fn writable(&self) -> Result<(), Errno> {
        if self.primary.load(Ordering::Acquire) { Ok(()) } else { Err(Errno::EROFS) }
    }

    fn attr(&self, tree: &Tree, inode: InodeNumber) -> Result<FileAttr, Errno> {
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
    fn entry(&self, tree: &Tree, inode: InodeNumber) -> Result<FileAttr, Errno> {
        let attr = self.attr(tree, inode)?;
        tree.node(inode)?.lookups.fetch_add(1, Ordering::AcqRel);
        Ok(attr)
    }

    /// `None`: no such name, which the kernel may remember.
    fn lookup(&self, parent: InodeNumber, name: &OsStr) -> Result<Option<FileAttr>, Errno> {
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
    fn forget(&self, inode: InodeNumber, count: u64) {
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

    fn create(
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

    fn remove(&self, parent: InodeNumber, name: &OsStr) -> Result<(), Errno> {
        self.writable()?;
        let name = file_name(name)?;
        let mut tree = self.store.tree_mut();
        let inode = self.store.remove(&mut tree, parent, &name)?;
        self.log.record(FileChange::Remove { parent, name }, &[inode, parent]);
        drop(tree);
        self.forget_unused(inode);
        Ok(())
    }

    fn link(
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

    fn rename(
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

    fn truncate(&self, inode: InodeNumber, size_bytes: u64) -> Result<(), Errno> {
        self.with_content(inode, |open| {
            open.file.set_len(size_bytes).map_err(|error| errno_of(&error))?;
            self.log.record_content(inode, FileChange::Truncate { inode, size_bytes });
            Ok(())
        })
    }

    /// Takes set-user-ID and set-group-ID away, as a write or truncation by a user without
    /// privilege does.
    fn kill_privileges(&self, inode: InodeNumber) -> Result<(), Errno> {
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

    fn write(
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

    fn allocate(
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

    fn set_xattr(
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

    fn remove_xattr(&self, inode: InodeNumber, name: &OsStr) -> Result<(), Errno> {
        self.writable()?;
        let name = xattr_name(name)?;
        let tree = self.store.tree();
        let fd = self.store.node_fd(&tree, inode)?;
        hotspare_kernel::remove_xattr(fd, &name)?;
        self.log.record_content(inode, FileChange::RemoveXattr { inode, name: name.into_bytes() });
        Ok(())
    }

    fn sync(&self, request: &Request, inode: InodeNumber, data_only: bool) -> Result<(), Errno> {
        // Our own flush wants the kernel's pages here, not on the disk.
        if request.pid() == self.flushing_thread.load(Ordering::Acquire) {
            return Ok(());
        }
        let open = self.store.opened(inode).ok_or(Errno::EBADF)?;
        let synced = if data_only { open.file.sync_data() } else { open.file.sync_all() };
        synced.map_err(|error| errno_of(&error))
    }
}

/// Answers an xattr request: with the size if `size` is 0, with the bytes if they fit.
fn reply_xattr(reply: ReplyXattr, size: u32, result: Result<Vec<u8>, Errno>) {
    match result {
        Ok(bytes) if size == 0 => reply.size(bytes.len() as u32),
        Ok(bytes) if bytes.len() <= size as usize => reply.data(&bytes),
        Ok(_) => reply.error(fuser::Errno::ERANGE),
        Err(error) => reply.error(refuse(error)),
    }
}

fn reply_entry(reply: ReplyEntry, result: Result<FileAttr, Errno>) {
    match result {
        Ok(attr) => reply.entry(&FOR_EVER, &attr, Generation(0)),
        Err(error) => reply.error(refuse(error)),
    }
}

fn reply_empty(reply: ReplyEmpty, result: Result<(), Errno>) {
    match result {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(refuse(error)),
    }
}

fn is_mappable(flags: OpenFlags) -> bool {
    flags.acc_mode() == OpenAccMode::O_RDWR
}

impl fuser::Filesystem for Server {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        for capability in [
            InitFlags::FUSE_EXPORT_SUPPORT,
            InitFlags::FUSE_PARALLEL_DIROPS,
            InitFlags::FUSE_ASYNC_DIO,
            InitFlags::FUSE_CACHE_SYMLINKS,
            InitFlags::FUSE_HANDLE_KILLPRIV_V2,
        ] {
            // All known since Linux 5.12; without them it is only slower.
            let _ = config.add_capabilities(capability);
        }
        let _ = config.set_max_write(WRITE_BYTES_MAX);
        let _ = config.set_max_background(64);
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.0.lookup(inode(parent), name) {
            Ok(Some(attr)) => reply.entry(&FOR_EVER, &attr, Generation(0)),
            Ok(None) => reply.entry(&FOR_EVER, &no_entry(), Generation(0)),
            Err(error) => reply.error(refuse(error)),
        }
    }

    fn forget(&self, _: &Request, number: INodeNo, count: u64) {
        self.0.forget(inode(number), count);
    }

    fn getattr(&self, _: &Request, number: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.0.attr(&self.0.store.tree(), inode(number)) {
            Ok(attr) => reply.attr(&FOR_EVER, &attr),
            Err(error) => reply.error(refuse(error)),
        }
    }

    fn setattr(
        &self,
        request: &Request,
        number: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        accessed: Option<TimeOrNow>,
        modified: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let shared = &self.0;
        let inode = inode(number);
        let change = || {
            shared.writable()?;
            if let Some(size) = size {
                shared.truncate(inode, size)?;
                if request.uid() != 0 {
                    shared.kill_privileges(inode)?;
                }
            }
            let tree = shared.store.tree();
            let fd = shared.store.node_fd(&tree, inode)?;
            if uid.is_some() || gid.is_some() {
                fd.set_owner(uid, gid)?;
            }
            if let Some(mode) = mode {
                fd.set_mode(mode)?;
            }
            if accessed.is_some() || modified.is_some() {
                fd.set_times(time_spec(accessed), time_spec(modified))?;
            }
            shared.log.touch(inode);
            shared.attr(&tree, inode)
        };
        match change() {
            Ok(attr) => reply.attr(&FOR_EVER, &attr),
            Err(error) => reply.error(refuse(error)),
        }
    }

    fn readlink(&self, _: &Request, number: INodeNo, reply: ReplyData) {
        let tree = self.0.store.tree();
        let target = self
            .0
            .store
            .node_fd(&tree, inode(number))
            .and_then(|fd| nix::fcntl::readlinkat(fd.as_fd(), ""));
        match target {
            Ok(target) => reply.data(target.as_bytes()),
            Err(error) => reply.error(refuse(error)),
        }
    }

    fn mknod(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _: u32,
        _: u32,
        reply: ReplyEntry,
    ) {
        let kind = match SFlag::from_bits_truncate(mode & SFlag::S_IFMT.bits()) {
            SFlag::S_IFREG => NodeKind::Regular,
            SFlag::S_IFIFO => NodeKind::Fifo,
            SFlag::S_IFSOCK => NodeKind::Socket,
            _ => return reply.error(fuser::Errno::EPERM),
        };
        let created = self.0.create(request, inode(parent), name, kind, mode);
        reply_entry(reply, created.map(|(attr, _)| attr));
    }

    fn mkdir(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _: u32,
        reply: ReplyEntry,
    ) {
        let created = self.0.create(request, inode(parent), name, NodeKind::Directory, mode);
        reply_entry(reply, created.map(|(attr, _)| attr));
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        reply_empty(reply, self.0.remove(inode(parent), name));
    }

    fn rmdir(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        reply_empty(reply, self.0.remove(inode(parent), name));
    }

    fn symlink(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        target: &Path,
        reply: ReplyEntry,
    ) {
        let kind = NodeKind::Symlink(target.as_os_str().as_bytes().to_vec());
        let created = self.0.create(request, inode(parent), name, kind, 0o777);
        reply_entry(reply, created.map(|(attr, _)| attr));
    }

    fn rename(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: fuser::RenameFlags,
        reply: ReplyEmpty,
    ) {
        let (from, to) = ((inode(parent), name), (inode(new_parent), new_name));
        reply_empty(reply, self.0.rename(from, to, flags));
    }

    fn link(&self, _: &Request, number: INodeNo, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        reply_entry(reply, self.0.link(inode(number), inode(parent), name));
    }

    fn open(&self, _: &Request, number: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        match self.0.store.acquire(inode(number), is_mappable(flags), None) {
            Ok(_) => reply.opened(FileHandle(number.0), FopenFlags::FOPEN_KEEP_CACHE),
            Err(error) => reply.error(refuse(error)),
        }
    }

    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let mappable = is_mappable(OpenFlags(flags));
        let created = self
            .0
            .create(request, inode(parent), name, NodeKind::Regular, mode)
            .and_then(|(attr, file)| {
                self.0.store.acquire(inode(attr.ino), mappable, file)?;
                Ok(attr)
            });
        match created {
            Ok(attr) => reply.created(
                &FOR_EVER,
                &attr,
                Generation(0),
                FileHandle(attr.ino.0),
                FopenFlags::FOPEN_KEEP_CACHE,
            ),
            Err(error) => reply.error(refuse(error)),
        }
    }

    fn read(
        &self,
        _: &Request,
        number: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let Some(open) = self.0.store.opened(inode(number)) else {
            return reply.error(fuser::Errno::EBADF);
        };
        READ_BUFFER.with_borrow_mut(|buffer| {
            if buffer.len() < size as usize {
                buffer.resize(size as usize, 0);
            }
            match read_full(&open, &mut buffer[..size as usize], offset) {
                Ok(count) => reply.data(&buffer[..count]),
                Err(error) => reply.error(refuse(error)),
            }
        });
    }

    fn write(
        &self,
        _: &Request,
        number: INodeNo,
        _: FileHandle,
        offset: u64,
        bytes: &[u8],
        write_flags: WriteFlags,
        flags: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        match self.0.write(inode(number), offset, bytes, write_flags, flags) {
            Ok(count) => reply.written(count as u32),
            Err(error) => reply.error(refuse(error)),
        }
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        // Nothing is held back here; the kernel stops asking.
        reply.error(fuser::Errno::ENOSYS);
    }

    fn release(
        &self,
        _: &Request,
        number: INodeNo,
        _: FileHandle,
        flags: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        self.0.store.release(inode(number), is_mappable(flags));
        reply.ok();
    }

    fn fsync(
        &self,
        request: &Request,
        number: INodeNo,
        _: FileHandle,
        data_only: bool,
        reply: ReplyEmpty,
    ) {
        reply_empty(reply, self.0.sync(request, inode(number), data_only));
    }

    fn fsyncdir(&self, _: &Request, number: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        reply_empty(reply, self.0.store.sync_directory(inode(number)));
    }

    fn readdir(
        &self,
        _: &Request,
        number: INodeNo,
        _: FileHandle,
        position: u64,
        mut reply: ReplyDirectory,
    ) {
        let tree = self.0.store.tree();
        let node = match tree.directory(inode(number)) {
            Ok(node) => node,
            Err(error) => return reply.error(refuse(error)),
        };
        let above = node.names.first().map_or(inode(number), |(above, _)| *above);
        for (at, name, number) in [(1, ".", inode(number)), (2, "..", above)] {
            if position < at && reply.add(INodeNo(number.0), at, FileType::Directory, name) {
                return reply.ok();
            }
        }
        for (at, name, number) in node.entries.after(position.max(2)) {
            let Ok(child) = tree.node(number) else { continue };
            let name = OsStr::from_bytes(name.as_bytes());
            if reply.add(INodeNo(number.0), at, file_type(child.kind), name) {
                break;
            }
        }
        reply.ok();
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        match nix::sys::statvfs::fstatvfs(self.0.store.root()) {
            Ok(stat) => reply.statfs(
                stat.blocks(),
                stat.blocks_free(),
                stat.blocks_available(),
                stat.files(),
                stat.files_free(),
                stat.block_size() as u32,
                stat.name_max() as u32,
                stat.fragment_size() as u32,
            ),
            Err(error) => reply.error(refuse(error)),
        }
    }

    fn setxattr(
        &self,
        _: &Request,
        number: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _: u32,
        reply: ReplyEmpty,
    ) {
        reply_empty(reply, self.0.set_xattr(inode(number), name, value, flags));
    }

    fn getxattr(&self, _: &Request, number: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        let tree = self.0.store.tree();
        let value = xattr_name(name).and_then(|name| {
            hotspare_kernel::get_xattr(self.0.store.node_fd(&tree, inode(number))?, &name)
        });
        reply_xattr(reply, size, value);
    }

    fn listxattr(&self, _: &Request, number: INodeNo, size: u32, reply: ReplyXattr) {
        let tree = self.0.store.tree();
        let names =
            self.0.store.node_fd(&tree, inode(number)).and_then(hotspare_kernel::list_xattrs);
        reply_xattr(reply, size, names);
    }

    fn removexattr(&self, _: &Request, number: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        reply_empty(reply, self.0.remove_xattr(inode(number), name));
    }

    fn fallocate(
        &self,
        _: &Request,
        number: INodeNo,
        _: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        reply_empty(reply, self.0.allocate(inode(number), offset, length, mode));
    }

    fn lseek(
        &self,
        _: &Request,
        number: INodeNo,
        _: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let whence = match whence {
            libc::SEEK_DATA => nix::unistd::Whence::SeekData,
            libc::SEEK_HOLE => nix::unistd::Whence::SeekHole,
            _ => return reply.error(fuser::Errno::EINVAL),
        };
        let found = self
            .0
            .store
            .opened(inode(number))
            .ok_or(Errno::EBADF)
            .and_then(|open| nix::unistd::lseek(&open.file, offset, whence));
        match found {
            Ok(offset) => reply.offset(offset),
            Err(error) => reply.error(refuse(error)),
        }
    }

    fn copy_file_range(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: u64,
        _: INodeNo,
        _: FileHandle,
        _: u64,
        _: u64,
        _: fuser::CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        // The kernel then copies by reads and writes, which are logged as such.
        reply.error(fuser::Errno::ENOSYS);
    }

    fn ioctl(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: fuser::IoctlFlags,
        _: u32,
        _: &[u8],
        _: u32,
        reply: fuser::ReplyIoctl,
    ) {
        reply.error(fuser::Errno::ENOTTY);
    }

    fn poll(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: fuser::PollNotifier,
        _: fuser::PollEvents,
        _: fuser::PollFlags,
        reply: fuser::ReplyPoll,
    ) {
        // Always ready, as regular files are; the kernel stops asking.
        reply.error(fuser::Errno::ENOSYS);
    }
}

/// Attributes that say "no such name" (`ino` 0) in a way the kernel may cache.
fn no_entry() -> FileAttr {
    FileAttr {
        ino: INodeNo(0),
        size: 0,
        blocks: 0,
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind: FileType::RegularFile,
        perm: 0,
        nlink: 0,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 0,
        flags: 0,
    }
}

/// Reads until `buffer` is full or the file ends.
fn read_full(open: &OpenFile, buffer: &mut [u8], offset: u64) -> Result<usize, Errno> {
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
