//! pidfd_open(2), pidfd_getfd(2).

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use crate::error::{Result, check};
use crate::ptrace::HostPid;

/// A descriptor that stands for process `pid`; readable when it has ended.
pub fn open(pid: HostPid) -> Result<OwnedFd> {
    // SAFETY: no pointer is passed.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid.0, 0) };
    let fd = check("open pidfd", fd)?;
    // SAFETY: the kernel just gave us this descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// A duplicate of descriptor `fd` of the process, close-on-exec, on the same open file
/// description. While it is open, the guest's own close(2) does not end the object.
pub fn get_fd(process: BorrowedFd<'_>, fd: i32) -> Result<OwnedFd> {
    // SAFETY: no pointer is passed.
    let copy = unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), fd, 0) };
    let copy = check("take descriptor", copy)?;
    // SAFETY: the kernel just gave us this descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(copy as i32) })
}

/// Sends a signal to the process (pidfd_send_signal(2)).
pub fn send_signal(process: BorrowedFd<'_>, signal: i32) -> Result<()> {
    let (fd, number) = (process.as_raw_fd(), libc::SYS_pidfd_send_signal);
    // SAFETY: no information is passed along.
    let done = unsafe { libc::syscall(number, fd, signal, std::ptr::null::<libc::siginfo_t>(), 0) };
    check("send signal", done).map(drop)
}
