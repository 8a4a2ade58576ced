//! Kernel objects: both halves, capture and restore, of each kind in one file.
//!
//! [`capture`] takes all descriptors of the stopped guest, [`restore`] makes them anew on the
//! spare. Each kind of object has a file of its own with what is particular to it.

use std::os::fd::BorrowedFd;

use hotspare_kernel::HostPid;

pub mod capture;
pub mod class;
pub mod device;
pub mod directory;
pub mod epoll;
pub mod error;
pub mod eventfd;
pub mod fdinfo;
pub mod inotify;
pub mod ipc;
pub mod memfd;
pub mod mqueue;
pub mod netlink;
pub mod outside;
pub mod patience;
pub mod pidfd;
pub mod pipe;
pub mod proc_file;
pub mod regular;
pub mod remote_step;
pub mod resting;
pub mod restore;
pub mod rules;
pub mod semaphore_undo;
pub mod signalfd;
pub mod socket;
pub mod socket_options;
pub mod table;
pub mod tcp;
pub mod timerfd;
pub mod udp;
pub mod unix;

/// `AT_FDCWD`: absolute paths are opened from here.
fn working_directory() -> BorrowedFd<'static> {
    nix::fcntl::AT_FDCWD
}

/// Our own number, as kcmp(2) wants it.
fn own_pid() -> HostPid {
    HostPid(std::process::id() as i32)
}
