//! Making all open files of a checkpoint anew on the spare.
//!
//! Runs on a thread of the agent that has entered the ghost's mount, ipc and network namespaces,
//! so that paths, queues and addresses are the ghost's. The files then go to the ghost over a
//! socket. TCP connections stay silent until [`super::socket::go_live`].
//!
//! Order: what stands alone; pipes; sockets, whose queues may hold any of the others; inotify,
//! which must not see the opening of the others; epoll, which refers to all.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use hotspare_image::memory::SharedId;
use hotspare_image::objects::{Descriptor, FileId, Object, OpenFile};
use hotspare_image::tree::{ClockReading, GuestPid, HostPath};
use hotspare_kernel::opener::Opener;
use hotspare_kernel::{HostPid, KernelError, descriptor};

use super::error::{ObjectError, ObjectResult};
use super::remote_step::{self, RemoteStep};
use super::rules::FileRules;
use super::unix::SocketPairs;
use super::{
    device, directory, epoll, eventfd, inotify, memfd, mqueue, outside, pidfd, pipe, proc_file,
    regular, signalfd, socket, timerfd,
};

/// What the ghost has besides descriptors.
pub trait GhostParts {
    /// The host's number of the ghost's process (or thread) `pid`.
    fn host_pid(&self, pid: GuestPid) -> Option<HostPid>;
    /// The memory of shared object `id`, open for reading and writing.
    fn shared(&self, id: SharedId) -> Option<BorrowedFd<'_>>;
    /// What takes the place of standard descriptor `standard` here; none for /dev/null.
    fn outside(&self, standard: i32) -> Option<BorrowedFd<'_>>;
    /// Socket pairs that processes of the ghost made, for [`super::unix::wanted_pairs`]. Asked
    /// once.
    fn socket_pairs(&self) -> SocketPairs {
        SocketPairs::new()
    }
}

/// A ghost that has nothing but descriptors.
#[derive(Clone, Copy, Debug)]
pub struct NoParts;

impl GhostParts for NoParts {
    fn host_pid(&self, _: GuestPid) -> Option<HostPid> {
        None
    }
    fn shared(&self, _: SharedId) -> Option<BorrowedFd<'_>> {
        None
    }
    fn outside(&self, _: i32) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// Where files are made.
pub struct RestoreContext<'a> {
    /// The ghost.
    pub parts: &'a dyn GhostParts,
    /// Standing of paths.
    pub rules: &'a FileRules,
    /// Clocks at the checkpoint.
    pub clocks: ClockReading,
    /// How old the checkpoint may be at most, ms.
    pub age_ms: u32,
    // `/proc/self/fd`, from before the thread entered the ghost's mount namespace: the ghost's
    // /proc does not show us.
    own: OwnedFd,
    /// For paths that we may serve ourselves; started with the first.
    opener: OnceCell<Opener>,
}

/// Opens `/proc/self/fd`; to be called before entering the ghost's mount namespace.
pub fn own_descriptors() -> ObjectResult<OwnedFd> {
    let path = c"/proc/self/fd";
    Ok(descriptor::open_at(super::working_directory(), path, libc::O_DIRECTORY)?)
}

impl<'a> RestoreContext<'a> {
    /// A context; `own` comes from [`own_descriptors`].
    pub fn new(
        parts: &'a dyn GhostParts,
        rules: &'a FileRules,
        clocks: ClockReading,
        age_ms: u32,
        own: OwnedFd,
    ) -> Self {
        Self { parts, rules, clocks, age_ms, own, opener: OnceCell::new() }
    }

    fn opener(&self) -> std::io::Result<&Opener> {
        if let Some(opener) = self.opener.get() {
            return Ok(opener);
        }
        let opener = Opener::start()?;
        Ok(self.opener.get_or_init(|| opener))
    }

    /// Opens an existing path in the ghost's mount namespace with open(2) `flags`.
    pub(super) fn open(&self, path: &HostPath, flags: u32) -> ObjectResult<OwnedFd> {
        let name = c_path(path)?;
        if !path.0.starts_with('/') {
            return Err(ObjectError::Image(format!("relative path {:?}", path.0)));
        }
        if self.rules.root(&path.0).is_some() {
            let opened = self.opener();
            return opened
                .and_then(|opener| opener.open(path.0.as_ref(), opening(flags)))
                .map_err(KernelError::io("open a file of the guest"))
                .map_err(ObjectError::kernel(path.0.clone()));
        }
        descriptor::open_at(super::working_directory(), &name, opening(flags))
            .map_err(ObjectError::kernel(path.0.clone()))
    }

    /// Opens inode `inode` of the replicated directory that `path` lay in.
    pub(super) fn open_unlinked(
        &self,
        path: &HostPath,
        inode: u64,
        flags: u32,
    ) -> ObjectResult<OwnedFd> {
        let root = self.rules.root(&path.0).ok_or_else(|| {
            let reason = "its directory is not replicated on this host";
            ObjectError::refused(&path.0, reason)
        })?;
        let opened = self.opener();
        opened
            .and_then(|opener| opener.open_inode(root.as_ref(), inode, opening(flags)))
            .map_err(KernelError::io("open deleted file"))
            .map_err(ObjectError::kernel(path.0.clone()))
    }

    /// Does with `file` what may have to wait for ourselves, in the same namespaces and working
    /// directory.
    pub(super) fn aside<T: Send + 'static>(
        &self,
        file: BorrowedFd<'_>,
        work: impl FnOnce(BorrowedFd<'_>) -> ObjectResult<T> + Send + 'static,
    ) -> ObjectResult<T> {
        let done = self.opener().and_then(|opener| opener.run(file, work));
        let what = "name a socket of the guest";
        done.map_err(KernelError::io(what)).map_err(ObjectError::kernel(what))?
    }

    /// Opens what `file` is open on once more, as a description of its own.
    pub(super) fn reopen(&self, file: BorrowedFd<'_>, flags: u32) -> ObjectResult<OwnedFd> {
        let name = CString::new(file.as_raw_fd().to_string()).expect("digits");
        Ok(descriptor::open_at(self.own.as_fd(), &name, opening(flags))?)
    }

    /// Watches what our descriptor `file` is open on; the watch's number. The thread must not
    /// share its working directory with others (`CLONE_FS`).
    pub(super) fn watch_own(
        &self,
        inotify: BorrowedFd<'_>,
        file: BorrowedFd<'_>,
        mask: u32,
    ) -> ObjectResult<i32> {
        let name = CString::new(file.as_raw_fd().to_string()).expect("digits");
        let enter = |errno| KernelError::from_errno("enter directory", errno as i32);
        nix::unistd::fchdir(&self.own).map_err(enter)?;
        let watched = descriptor::add_watch(inotify, &name, mask);
        nix::unistd::chdir("/").map_err(enter)?;
        Ok(watched?)
    }
}

fn c_path(path: &HostPath) -> ObjectResult<CString> {
    CString::new(path.0.as_bytes())
        .map_err(|_| ObjectError::Image(format!("path with a zero byte: {:?}", path.0)))
}

/// Of a description's flags those that open(2) takes. `O_ASYNC` waits for an owner; the flags of
/// creation mean nothing any more.
fn opening(flags: u32) -> i32 {
    let kept = libc::O_ACCMODE
        | libc::O_APPEND
        | libc::O_NONBLOCK
        | libc::O_SYNC
        | libc::O_DSYNC
        | libc::O_DIRECT
        | libc::O_DIRECTORY
        | libc::O_NOFOLLOW
        | libc::O_NOATIME
        | libc::O_PATH;
    flags as i32 & kept
}

/// Sets the status flags that fcntl(2) can change, if they differ from a new description's.
pub(super) fn set_flags(file: &OwnedFd, flags: u32) -> ObjectResult<()> {
    let changeable = libc::O_APPEND | libc::O_NONBLOCK | libc::O_DIRECT | libc::O_NOATIME;
    let wanted = flags as i32 & changeable;
    let has = descriptor::status_flags(file.as_fd())?;
    if has & changeable != wanted {
        descriptor::set_status_flags(file.as_fd(), has & !changeable | wanted)?;
    }
    Ok(())
}

/// Sets the offset of a new description.
pub(super) fn seek(file: &OwnedFd, offset: u64) -> ObjectResult<()> {
    if offset != 0 {
        descriptor::seek(file.as_fd(), offset)?;
    }
    Ok(())
}

/// All open files, and what the ghost has still to do.
#[derive(Debug, Default)]
pub struct Restored {
    /// The files.
    pub files: BTreeMap<FileId, OwnedFd>,
    /// Calls to make inside the ghost once its descriptors are in place, in this order.
    pub steps: Vec<RemoteStep>,
}

/// Makes all `files`, whose descriptors are in `tables`. On failure nothing remains but what the
/// ghost's file systems and queues saw.
pub fn restore_all(
    files: &[OpenFile],
    tables: &[(GuestPid, &[Descriptor])],
    context: &RestoreContext<'_>,
) -> ObjectResult<Restored> {
    let mut made = BTreeMap::new();
    let mut pipes: BTreeMap<u64, Vec<pipe::End<'_>>> = BTreeMap::new();
    let mut watching = Vec::new();
    let mut queues = mqueue::QueueRestore::default();
    for file in files {
        match &file.object {
            Object::Pipe(end) => {
                pipes.entry(end.pipe).or_default().push((file.id, file.flags, end))
            }
            Object::Inotify(image) => watching.push((file, image)),
            Object::MessageQueue(image) => {
                made.insert(file.id, queues.restore(image, file.flags, context)?);
            }
            Object::Unix(_) | Object::Udp(_) | Object::Tcp(_) | Object::Netlink(_) => {}
            object => {
                made.insert(file.id, restore_one(object, file.flags, context)?);
            }
        }
    }
    for ends in pipes.values() {
        made.append(&mut pipe::restore(ends, context)?);
    }
    let host_pid = |pid| context.parts.host_pid(pid).map(|host| host.0);
    let pairs = context.parts.socket_pairs();
    socket::restore(files, context, pairs, &mut made, &host_pid)?;
    for (file, image) in watching {
        made.insert(file.id, inotify::restore(image, file.flags, context)?);
    }
    if let Some(missing) = files.iter().find(|file| !made.contains_key(&file.id)) {
        return Err(ObjectError::Image(format!("file {} was not made", missing.id)));
    }
    let mut steps = remote_step::for_files(files, tables)?;
    steps.append(&mut epoll::restore_watches(files, &made, tables)?);
    Ok(Restored { files: made, steps })
}

/// Makes one file that stands alone. Epoll instances get their registrations later.
fn restore_one(object: &Object, flags: u32, context: &RestoreContext<'_>) -> ObjectResult<OwnedFd> {
    match object {
        Object::Regular(image) => regular::restore(image, flags, context),
        Object::Directory(image) => directory::restore(image, flags, context),
        Object::EventFd(image) => eventfd::restore(image, flags),
        Object::Epoll(_) => epoll::restore(flags),
        Object::TimerFd(image) => timerfd::restore(image, flags, &context.clocks),
        Object::SignalFd(image) => signalfd::restore(image, flags),
        Object::PidFd(image) => pidfd::restore(image, flags, context),
        Object::Memfd(image) => memfd::restore(image, flags, context),
        Object::Device(image) => device::restore(image, flags, context),
        Object::Outside(image) => outside::restore(image, flags, context),
        Object::Proc(image) => proc_file::restore(image, flags, context),
        Object::Pipe(_)
        | Object::MessageQueue(_)
        | Object::Inotify(_)
        | Object::Unix(_)
        | Object::Udp(_)
        | Object::Tcp(_)
        | Object::Netlink(_) => Err(ObjectError::Image("made out of order".to_owned())),
    }
}
