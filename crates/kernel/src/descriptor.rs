//! Open file descriptions: comparing, duplicating, looking at them without touching their state.
//!
//! Sockets have their own file; what is here works on any descriptor or on one of the kernel's
//! small objects (pipe, eventfd, timerfd, signalfd, inotify, pidfd).

use std::cmp::Ordering;
use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use nix::sys::resource::{Resource, getrlimit};

use crate::error::{KernelError, Result, check};
use crate::ptrace::HostPid;

/// A descriptor of a process, as kcmp(2) names it.
pub type Place = (HostPid, i32);

// kcmp(2), linux/kcmp.h.
const KCMP_FILE: i32 = 0;
const KCMP_FILES: i32 = 2;
const KCMP_EPOLL_TFD: i32 = 7;
// linux/fcntl.h, asm-generic/fcntl.h.
const F_SETOWN_EX: i32 = 15;
const F_GETOWN_EX: i32 = 16;
const F_SETSIG: i32 = 10;
const F_GETSIG: i32 = 11;
// linux/timerfd.h: _IOW('T', 0, __u64).
const TFD_IOC_SET_TICKS: libc::c_ulong = 0x4008_5400;

fn own(fd: libc::c_long) -> OwnedFd {
    // SAFETY: callers pass a descriptor that the kernel has just given them.
    unsafe { OwnedFd::from_raw_fd(fd as i32) }
}

/// Gives the calling thread a descriptor table of its own with standard input, output and error
/// and `keep` in it, and nothing else (unshare(2), close_range(2)).
///
/// From here on the thread may use no other descriptor that was opened before.
pub fn leave_table(keep: BorrowedFd<'_>) -> Result<()> {
    // SAFETY: no pointer is passed; other threads keep their table.
    let ret = unsafe { libc::unshare(libc::CLONE_FILES) };
    check("leave shared descriptor table", ret.into())?;
    let keep = keep.as_raw_fd().unsigned_abs();
    for (first, last) in [(3, keep.wrapping_sub(1)), (keep + 1, u32::MAX)] {
        if first <= last {
            // SAFETY: no pointer is passed; the table is this thread's own.
            let ret = unsafe { libc::syscall(libc::SYS_close_range, first, last, 0u32) };
            check("close descriptors of others", ret)?;
        }
    }
    Ok(())
}

/// What must end soon after this process is killed, the soonest last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Soon {
    /// A stream: whoever hears its end takes over.
    Stream,
    /// What the guest's init hangs on: the guest is to be gone by then.
    Guest,
}

/// Moves a descriptor to a number above most others, so that it is among the first that are closed
/// when this process is killed.
///
/// The kernel puts off the last close of each file until all descriptors of the process are
/// through, and then goes back from the last to the first (`close_files`, `task_work_run`). A
/// device and a userfaultfd take tens of milliseconds there, for which whoever waits for the end
/// of a stream would wait too. Where there is no number left up there, it stays where it is.
#[must_use]
pub fn closed_early(fd: OwnedFd, soon: Soon) -> OwnedFd {
    /// A table of this size is small (32 KiB) and seldom full.
    const TABLE: u64 = 4096;
    const EACH: u64 = 64;
    let soft = getrlimit(Resource::RLIMIT_NOFILE).map_or(0, |(soft, _)| soft);
    let below_top = match soon {
        Soon::Stream => 2 * EACH,
        Soon::Guest => EACH,
    };
    let Some(least) = soft.min(TABLE).checked_sub(below_top) else { return fd };
    // SAFETY: no pointer is passed.
    let up = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, least as i32) };
    if up < 0 { fd } else { own(up.into()) }
}

fn compare(verb: &'static str, arguments: [i64; 5]) -> Result<Ordering> {
    let [first, second, kind, one, other] = arguments;
    // SAFETY: for KCMP_EPOLL_TFD `other` is the address of a live slot, else a number.
    let order = unsafe { libc::syscall(libc::SYS_kcmp, first, second, kind, one, other) };
    match check(verb, order)? {
        0 => Ok(Ordering::Equal),
        1 => Ok(Ordering::Less),
        2 => Ok(Ordering::Greater),
        other => Err(KernelError::Unexpected(format!("kcmp answered {other}"))),
    }
}

/// The order the kernel gives two open file descriptions; equal when they are one.
///
/// Both processes must be stopped or be the caller. The order is stable while both exist
/// (kcmp(2)).
pub fn compare_files(one: Place, other: Place) -> Result<Ordering> {
    let (first, second) = (one.0.0.into(), other.0.0.into());
    compare("compare open files", [first, second, KCMP_FILE.into(), one.1.into(), other.1.into()])
}

/// The order of two tasks' descriptor tables; equal when they share one (`CLONE_FILES`).
pub fn compare_tables(one: HostPid, other: HostPid) -> Result<Ordering> {
    compare("compare descriptor tables", [one.0.into(), other.0.into(), KCMP_FILES.into(), 0, 0])
}

/// `struct kcmp_epoll_slot` (linux/kcmp.h).
#[repr(C)]
struct EpollSlot {
    epoll: u32,
    target: u32,
    index: u32,
}

/// Whether `file` is what the `index`-th registration of number `target` in the epoll descriptor
/// `epoll` watches.
pub fn is_epoll_target(file: Place, epoll: Place, target: i32, index: u32) -> Result<bool> {
    let slot = EpollSlot { epoll: epoll.1 as u32, target: target as u32, index };
    let address = (&raw const slot) as i64;
    let (first, second) = (file.0.0.into(), epoll.0.0.into());
    let arguments = [first, second, KCMP_EPOLL_TFD.into(), file.1.into(), address];
    Ok(compare("compare epoll target", arguments)? == Ordering::Equal)
}

/// What statx(2) says without asking a remote file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileStat {
    /// Type and permission bits.
    pub mode: u32,
    /// Inode number.
    pub inode: u64,
    /// Device of the file system: major, minor.
    pub device: (u32, u32),
    /// Device that a device file stands for: major, minor.
    pub special: (u32, u32),
    /// Bytes.
    pub bytes: u64,
    /// Names.
    pub links: u32,
    /// User and group it belongs to.
    pub owner: (u32, u32),
}

impl FileStat {
    /// The file's type, one of `S_IFMT`.
    pub fn kind(&self) -> u32 {
        self.mode & libc::S_IFMT
    }
}

/// Looks at `name` below `directory` (or at `directory` itself where `name` is empty). Follows a
/// link at the end unless `nofollow`. Answers from the kernel's memory: a FUSE file system is not
/// asked (`AT_STATX_DONT_SYNC`).
pub fn stat_at(directory: BorrowedFd<'_>, name: &CStr, nofollow: bool) -> Result<FileStat> {
    let mut flags = libc::AT_EMPTY_PATH | libc::AT_STATX_DONT_SYNC | libc::AT_NO_AUTOMOUNT;
    if nofollow {
        flags |= libc::AT_SYMLINK_NOFOLLOW;
    }
    let mut stat = MaybeUninit::<libc::statx>::zeroed();
    let (fd, mask) = (directory.as_raw_fd(), libc::STATX_BASIC_STATS);
    // SAFETY: `name` ends with a zero byte and `stat` has room for the answer.
    let ret = unsafe { libc::statx(fd, name.as_ptr(), flags, mask, stat.as_mut_ptr()) };
    check("look at file", ret.into())?;
    // SAFETY: the structure is plain numbers, zeroed before and filled by the kernel.
    let stat = unsafe { stat.assume_init() };
    Ok(FileStat {
        mode: stat.stx_mode.into(),
        inode: stat.stx_ino,
        device: (stat.stx_dev_major, stat.stx_dev_minor),
        special: (stat.stx_rdev_major, stat.stx_rdev_minor),
        bytes: stat.stx_size,
        links: stat.stx_nlink,
        owner: (stat.stx_uid, stat.stx_gid),
    })
}

/// [`stat_at`] of an open file.
pub fn stat(file: BorrowedFd<'_>) -> Result<FileStat> {
    stat_at(file, c"", false)
}

/// Type of the file system behind `file` (`f_type` of statfs(2)).
pub fn file_system_kind(file: BorrowedFd<'_>) -> Result<i64> {
    let mut answer = MaybeUninit::<libc::statfs>::zeroed();
    // SAFETY: `answer` has room for the structure.
    let ret = unsafe { libc::fstatfs(file.as_raw_fd(), answer.as_mut_ptr()) };
    check("look at file system", ret.into())?;
    // SAFETY: plain numbers, zeroed before and filled by the kernel.
    let answer = unsafe { answer.assume_init() };
    Ok(answer.f_type)
}

/// openat(2), close-on-exec. Creates nothing: flags that would are refused.
pub fn open_at(directory: BorrowedFd<'_>, path: &CStr, flags: i32) -> Result<OwnedFd> {
    let creating = libc::O_CREAT | (libc::O_TMPFILE & !libc::O_DIRECTORY) | libc::O_TRUNC;
    if flags & creating != 0 {
        return Err(KernelError::Unexpected(format!("open with flags {flags:#o}")));
    }
    let flags = flags | libc::O_CLOEXEC;
    // SAFETY: `path` ends with a zero byte.
    let fd = unsafe { libc::openat(directory.as_raw_fd(), path.as_ptr(), flags) };
    Ok(own(check("open", fd.into())?))
}

/// readlinkat(2) into `buffer`; the target's length. `ENAMETOOLONG` where it does not fit.
pub fn read_link(directory: BorrowedFd<'_>, name: &CStr, buffer: &mut [u8]) -> Result<usize> {
    let (start, room) = (buffer.as_mut_ptr().cast(), buffer.len());
    let fd = directory.as_raw_fd();
    // SAFETY: `name` ends with a zero byte; `start` and `room` describe the caller's buffer.
    let bytes = unsafe { libc::readlinkat(fd, name.as_ptr(), start, room) };
    let bytes = check("read link", bytes as libc::c_long)? as usize;
    if bytes == room {
        return Err(KernelError::from_errno("read link", libc::ENAMETOOLONG));
    }
    Ok(bytes)
}

/// Bytes that read(2) would give: of a pipe, of an inotify queue (`FIONREAD`).
pub fn readable_bytes(file: BorrowedFd<'_>) -> Result<usize> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: FIONREAD writes one int.
    let ret = unsafe { libc::ioctl(file.as_raw_fd(), libc::FIONREAD, &raw mut bytes) };
    check("count unread bytes", ret.into())?;
    Ok(bytes.max(0) as usize)
}

/// Copies what is in pipe `from` to pipe `to` without consuming it (tee(2)); the number of bytes.
/// Never blocks.
pub fn tee(from: BorrowedFd<'_>, to: BorrowedFd<'_>, bytes: usize) -> Result<usize> {
    let (from, to, flags) = (from.as_raw_fd(), to.as_raw_fd(), libc::SPLICE_F_NONBLOCK);
    // SAFETY: no pointer is passed.
    let copied = unsafe { libc::tee(from, to, bytes, flags) };
    Ok(check("copy pipe", copied as libc::c_long)? as usize)
}

fn control(verb: &'static str, file: BorrowedFd<'_>, command: i32, value: i64) -> Result<i32> {
    // SAFETY: callers pass commands whose argument is a number or ignored.
    let ret = unsafe { libc::fcntl(file.as_raw_fd(), command, value) };
    Ok(check(verb, ret.into())? as i32)
}

/// `F_GETFL`.
pub fn status_flags(file: BorrowedFd<'_>) -> Result<i32> {
    control("read file flags", file, libc::F_GETFL, 0)
}

/// `F_SETFL`.
pub fn set_status_flags(file: BorrowedFd<'_>, flags: i32) -> Result<()> {
    control("set file flags", file, libc::F_SETFL, flags.into()).map(drop)
}

/// `F_GETPIPE_SZ`, bytes.
pub fn pipe_capacity(pipe: BorrowedFd<'_>) -> Result<u32> {
    Ok(control("read pipe capacity", pipe, libc::F_GETPIPE_SZ, 0)? as u32)
}

/// `F_SETPIPE_SZ`; the kernel may give more than asked.
pub fn set_pipe_capacity(pipe: BorrowedFd<'_>, bytes: u32) -> Result<u32> {
    Ok(control("set pipe capacity", pipe, libc::F_SETPIPE_SZ, bytes.into())? as u32)
}

/// `F_GET_SEALS` of a memfd.
pub fn seals(memfd: BorrowedFd<'_>) -> Result<u32> {
    Ok(control("read seals", memfd, libc::F_GET_SEALS, 0)? as u32)
}

/// Who gets SIGIO: `F_OWNER_*` and number (in the caller's pid namespace), and the signal
/// (fcntl(2)). Number 0 is nobody.
pub fn signal_owner(file: BorrowedFd<'_>) -> Result<(i32, i32, i32)> {
    let mut owner = [0i32; 2];
    // SAFETY: F_GETOWN_EX writes a `struct f_owner_ex`, two ints.
    let ret = unsafe { libc::fcntl(file.as_raw_fd(), F_GETOWN_EX, owner.as_mut_ptr()) };
    check("read file owner", ret.into())?;
    let signal = control("read file signal", file, F_GETSIG, 0)?;
    Ok((owner[0], owner[1], signal))
}

/// Numbers of the commands behind [`signal_owner`], for calls made inside the ghost:
/// `F_SETOWN_EX`, `F_SETSIG`.
pub const SIGNAL_OWNER_COMMANDS: (i32, i32) = (F_SETOWN_EX, F_SETSIG);

/// An eventfd with `count` in it.
pub fn eventfd(count: u64, flags: i32) -> Result<OwnedFd> {
    // SAFETY: no pointer is passed.
    let fd = unsafe { libc::eventfd(0, flags | libc::EFD_CLOEXEC) };
    let fd = own(check("create eventfd", fd.into())?);
    if count != 0 {
        write_once("set eventfd", &fd, &count.to_ne_bytes())?;
    }
    Ok(fd)
}

fn write_once(verb: &'static str, fd: &OwnedFd, bytes: &[u8]) -> Result<()> {
    let (start, length) = (bytes.as_ptr().cast(), bytes.len());
    // SAFETY: pointer and length describe the slice, which is only read.
    let written = unsafe { libc::write(fd.as_raw_fd(), start, length) };
    if check(verb, written as libc::c_long)? as usize != length {
        return Err(KernelError::Unexpected(format!("{verb}: short write")));
    }
    Ok(())
}

/// timerfd_create(2).
pub fn timerfd(clock: i32, flags: i32) -> Result<OwnedFd> {
    // SAFETY: no pointer is passed.
    let fd = unsafe { libc::timerfd_create(clock, flags | libc::TFD_CLOEXEC) };
    Ok(own(check("create timerfd", fd.into())?))
}

const NS: u64 = 1_000_000_000;

fn timespec(ns: u64) -> libc::timespec {
    libc::timespec { tv_sec: (ns / NS) as i64, tv_nsec: (ns % NS) as i64 }
}

/// timerfd_settime(2): first expiry and period, ns; 0 disarms. `flags` are `TFD_TIMER_*`.
pub fn set_timerfd(timer: BorrowedFd<'_>, flags: i32, value: u64, interval: u64) -> Result<()> {
    let new = libc::itimerspec { it_value: timespec(value), it_interval: timespec(interval) };
    let old = std::ptr::null_mut();
    // SAFETY: `new` outlives the call; a null pointer asks for no old value.
    let ret = unsafe { libc::timerfd_settime(timer.as_raw_fd(), flags, &raw const new, old) };
    check("arm timerfd", ret.into()).map(drop)
}

/// Makes the kernel count the expirations of a periodic timer up to now (timerfd_gettime(2) does;
/// `/proc/PID/fdinfo` does not).
pub fn settle_timerfd(timer: BorrowedFd<'_>) -> Result<()> {
    let mut now = MaybeUninit::<libc::itimerspec>::zeroed();
    // SAFETY: `now` has room for the answer, which is not looked at.
    let ret = unsafe { libc::timerfd_gettime(timer.as_raw_fd(), now.as_mut_ptr()) };
    check("read timerfd", ret.into()).map(drop)
}

/// Sets how many expirations are waiting to be read; not 0 (`TFD_IOC_SET_TICKS`).
pub fn set_timerfd_ticks(timer: BorrowedFd<'_>, ticks: u64) -> Result<()> {
    // SAFETY: the kernel reads one u64.
    let ret = unsafe { libc::ioctl(timer.as_raw_fd(), TFD_IOC_SET_TICKS, &raw const ticks) };
    check("set timerfd ticks", ret.into()).map(drop)
}

/// A signalfd that accepts the signals in `mask` (bit 0 is signal 1).
pub fn signalfd(mask: u64, flags: i32) -> Result<OwnedFd> {
    let (flags, bytes) = (flags | libc::SFD_CLOEXEC, size_of::<u64>());
    let mask = &raw const mask;
    // SAFETY: `mask` is the kernel's eight-byte signal set.
    let fd = unsafe { libc::syscall(libc::SYS_signalfd4, -1, mask, bytes, flags) };
    Ok(own(check("create signalfd", fd)?))
}

/// inotify_init1(2).
pub fn inotify(flags: i32) -> Result<OwnedFd> {
    // SAFETY: no pointer is passed.
    let fd = unsafe { libc::inotify_init1(flags | libc::IN_CLOEXEC) };
    Ok(own(check("create inotify", fd.into())?))
}

/// inotify_add_watch(2); the watch's number.
pub fn add_watch(inotify: BorrowedFd<'_>, path: &CStr, mask: u32) -> Result<i32> {
    // SAFETY: `path` ends with a zero byte.
    let wd = unsafe { libc::inotify_add_watch(inotify.as_raw_fd(), path.as_ptr(), mask) };
    Ok(check("watch path", wd.into())? as i32)
}

/// inotify_rm_watch(2).
pub fn remove_watch(inotify: BorrowedFd<'_>, wd: i32) -> Result<()> {
    // SAFETY: no pointer is passed.
    let ret = unsafe { libc::inotify_rm_watch(inotify.as_raw_fd(), wd) };
    check("remove watch", ret.into()).map(drop)
}

/// A pidfd with `flags` (`PIDFD_NONBLOCK`, `PIDFD_THREAD`).
pub fn pidfd(pid: HostPid, flags: i32) -> Result<OwnedFd> {
    // SAFETY: no pointer is passed.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid.0, flags) };
    Ok(own(check("open pidfd", fd)?))
}

/// A pidfd of a process that has ended and been waited for.
pub fn pidfd_of_the_dead() -> Result<OwnedFd> {
    let mut pidfd: libc::c_int = -1;
    let (number, flags) = (libc::SYS_clone, libc::CLONE_PIDFD);
    // SAFETY: without CLONE_VM the child has its own memory and goes on here on a copy of our
    // stack; the kernel writes the pidfd before the call returns.
    let child = unsafe { libc::syscall(number, flags, 0, &raw mut pidfd, 0, 0) };
    if check("create process", child)? == 0 {
        // SAFETY: ends the child at once; nothing of the parent's is touched.
        unsafe { libc::syscall(libc::SYS_exit_group, 0) };
    }
    let pidfd = own(pidfd.into());
    let mut answer = MaybeUninit::<libc::siginfo_t>::zeroed();
    let (id, flags) = (pidfd.as_raw_fd() as libc::id_t, libc::WEXITED | libc::__WALL);
    // SAFETY: `answer` has room for the structure, which is not looked at.
    let ret = unsafe { libc::waitid(libc::P_PIDFD, id, answer.as_mut_ptr(), flags) };
    match check("wait for process", ret.into()) {
        Ok(_) => Ok(pidfd),
        // Somebody else in this process waited for it.
        Err(error) if error.errno() == Some(libc::ECHILD) => Ok(pidfd),
        Err(error) => Err(error),
    }
}

/// pipe2(2), close-on-exec: reading end, writing end.
pub fn pipe(flags: i32) -> Result<(OwnedFd, OwnedFd)> {
    let mut ends = [-1i32; 2];
    // SAFETY: `ends` has room for two descriptors.
    let ret = unsafe { libc::pipe2(ends.as_mut_ptr(), flags | libc::O_CLOEXEC) };
    check("create pipe", ret.into())?;
    Ok((own(ends[0].into()), own(ends[1].into())))
}

/// lseek(2) to `offset` from the start. Offsets are the kernel's `loff_t`: some directories use
/// all 64 bits.
pub fn seek(file: BorrowedFd<'_>, offset: u64) -> Result<()> {
    // SAFETY: no pointer is passed.
    let at = unsafe { libc::lseek(file.as_raw_fd(), offset as i64, libc::SEEK_SET) };
    check("seek", at).map(drop)
}

/// mq_open(2) of an existing queue: `name` has no slash in front, as the kernel wants it.
pub fn open_queue(name: &CStr, flags: i32) -> Result<OwnedFd> {
    if flags & libc::O_CREAT != 0 {
        return Err(KernelError::Unexpected("creating a queue by opening it".into()));
    }
    let flags = flags | libc::O_CLOEXEC;
    // SAFETY: `name` ends with a zero byte; without O_CREAT there are no more arguments.
    let fd = unsafe { libc::syscall(libc::SYS_mq_open, name.as_ptr(), flags, 0, 0) };
    Ok(own(check("open message queue", fd)?))
}

/// Creates a queue of the default size with permission bits `mode` (mq_open(2)); fails where it
/// exists.
pub fn create_queue(name: &CStr, mode: u32) -> Result<OwnedFd> {
    let flags = libc::O_CREAT | libc::O_EXCL | libc::O_RDWR | libc::O_CLOEXEC;
    let (number, default) = (libc::SYS_mq_open, 0);
    // SAFETY: `name` ends with a zero byte; a null pointer asks for the default size.
    let fd = unsafe { libc::syscall(number, name.as_ptr(), flags, mode, default) };
    Ok(own(check("create message queue", fd)?))
}

/// mq_unlink(2).
pub fn remove_queue(name: &CStr) -> Result<()> {
    // SAFETY: `name` ends with a zero byte.
    let ret = unsafe { libc::syscall(libc::SYS_mq_unlink, name.as_ptr()) };
    check("remove message queue", ret).map(drop)
}

/// Largest `struct file_handle` payload (`MAX_HANDLE_SZ`).
pub const HANDLE_BYTES_MAX: usize = 128;

#[repr(C)]
struct FileHandle {
    bytes: u32,
    kind: i32,
    handle: [u8; HANDLE_BYTES_MAX],
}

/// open_by_handle_at(2) with `O_PATH`: the file that `handle` names on the file system that
/// `mount` is on. `None` where the file system cannot say.
pub fn open_handle(mount: BorrowedFd<'_>, kind: i32, handle: &[u8]) -> Result<Option<OwnedFd>> {
    if handle.len() > HANDLE_BYTES_MAX {
        return Err(KernelError::Unexpected(format!("file handle of {} bytes", handle.len())));
    }
    let mut whole = FileHandle { bytes: handle.len() as u32, kind, handle: [0; HANDLE_BYTES_MAX] };
    whole.handle[..handle.len()].copy_from_slice(handle);
    let flags = libc::O_PATH | libc::O_CLOEXEC;
    let (mount, number) = (mount.as_raw_fd(), libc::SYS_open_by_handle_at);
    // SAFETY: `whole` is a file handle whose length fits its room; it is only read.
    let fd = unsafe { libc::syscall(number, mount, &raw const whole, flags) };
    match check("open file handle", fd) {
        Ok(fd) => Ok(Some(own(fd))),
        Err(error) => match error.errno() {
            Some(libc::ESTALE | libc::EOPNOTSUPP | libc::EINVAL | libc::EOVERFLOW) => Ok(None),
            _ => Err(error),
        },
    }
}

/// flock(2) without waiting: `EWOULDBLOCK` where somebody else holds it.
pub fn lock_whole(file: BorrowedFd<'_>, exclusive: bool) -> Result<()> {
    let kind = if exclusive { libc::LOCK_EX } else { libc::LOCK_SH };
    // SAFETY: no pointer is passed.
    let ret = unsafe { libc::flock(file.as_raw_fd(), kind | libc::LOCK_NB) };
    check("lock file", ret.into()).map(drop)
}

/// A `struct flock` for `length` bytes from `start`; length 0 reaches to the end of the file.
pub fn lock_record(exclusive: bool, start: u64, length: u64) -> libc::flock {
    let kind = if exclusive { libc::F_WRLCK } else { libc::F_RDLCK };
    libc::flock {
        l_type: kind as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: start as i64,
        l_len: length as i64,
        l_pid: 0,
    }
}

/// The bytes of a `struct flock`, for a call made inside the ghost.
pub fn lock_record_bytes(lock: &libc::flock) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(size_of::<libc::flock>());
    bytes.extend_from_slice(&lock.l_type.to_ne_bytes());
    bytes.extend_from_slice(&lock.l_whence.to_ne_bytes());
    bytes.extend_from_slice(&[0; 4]);
    bytes.extend_from_slice(&lock.l_start.to_ne_bytes());
    bytes.extend_from_slice(&lock.l_len.to_ne_bytes());
    bytes.extend_from_slice(&lock.l_pid.to_ne_bytes());
    bytes.resize(size_of::<libc::flock>(), 0);
    bytes
}

/// `F_OFD_SETLK` without waiting.
pub fn lock_range(file: BorrowedFd<'_>, exclusive: bool, start: u64, length: u64) -> Result<()> {
    let lock = lock_record(exclusive, start, length);
    let (fd, command) = (file.as_raw_fd(), libc::F_OFD_SETLK);
    // SAFETY: `lock` outlives the call and is only read.
    let ret = unsafe { libc::fcntl(fd, command, &raw const lock) };
    check("lock file range", ret.into()).map(drop)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn what_ends_sooner_has_the_higher_number_and_works_as_before() {
        let (one, mut other) = UnixStream::pair().unwrap();
        let low = one.try_clone().unwrap();
        let guest = closed_early(one.into(), Soon::Guest);
        let stream = closed_early(low.into(), Soon::Stream);
        assert!(guest.as_raw_fd() > stream.as_raw_fd());
        assert!(stream.as_raw_fd() > other.as_fd().as_raw_fd());
        UnixStream::from(stream).write_all(b"word").unwrap();
        drop(guest);
        let mut heard = String::new();
        // The end is there with the last of them: neither was left behind where it came from.
        other.read_to_string(&mut heard).unwrap();
        assert_eq!(heard, "word");
    }
}
