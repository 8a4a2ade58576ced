//! The FUSE file system over a backing directory.
//!
//! # Cache mode
//!
//! write(2) goes through: the kernel updates its cached pages *and* sends the bytes here before the
//! call returns, so the log has every write in the order the guest made them. Reads come from the
//! kernel's cache (`FOPEN_KEEP_CACHE`), names and attributes stay cached for good: nobody else
//! changes the directory, and on a spare `apply` invalidates what it changes. Pages written through
//! a shared mapping are dirty in the kernel until it writes them back, which
//! [`crate::ReplicatedDir::flush`] makes it do. The write-back cache (`FUSE_WRITEBACK_CACHE`) would
//! make small writes cheaper, but all dirty data would have to be flushed while the guest is
//! stopped.

use std::cell::RefCell;
use std::ffi::OsStr;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{
    BsdFileFlags, FileAttr, FileHandle, FileType, FopenFlags, Generation, INodeNo, InitFlags,
    KernelConfig, LockOwner, OpenAccMode, OpenFlags, ReplyAttr, ReplyCreate, ReplyData,
    ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite,
    ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use hotspare_image::files::{InodeNumber, NodeKind};
use nix::errno::Errno;
use nix::sys::stat::SFlag;

use crate::shared::{Shared, file_type, read_full, time_spec, xattr_name};

/// How long the kernel may keep names and attributes: as good as for ever.
const FOR_EVER: Duration = Duration::from_secs(1 << 30);

/// Largest write the kernel sends at once, bytes (256 pages, its default limit).
const WRITE_BYTES_MAX: u32 = 1 << 20;

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

/// Nobody is asked at close(2), nor are pages written back there: an agent that is killed closes
/// its files while nobody answers any more, and would hang for ever.
fn opened_flags() -> FopenFlags {
    FopenFlags::FOPEN_KEEP_CACHE | FopenFlags::FOPEN_NOFLUSH
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
            Ok(_) => reply.opened(FileHandle(number.0), opened_flags()),
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
                opened_flags(),
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
