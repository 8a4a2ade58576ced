//! Being told that a child or tracee has news.

use std::os::fd::AsFd;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::time::TimeSpec;

use crate::error::{KernelError, Result};

/// Blocks `SIGCHLD` in the calling thread and in the threads it makes from here on. To be called
/// first in `main`: a thread that leaves it open would swallow the news.
pub fn block_child_signals() -> Result<()> {
    let mut set = SigSet::empty();
    set.add(Signal::SIGCHLD);
    set.thread_block().map_err(|errno| KernelError::from_errno("block SIGCHLD", errno as i32))
}

/// Readable when a child or tracee of this process has news.
#[derive(Debug)]
pub struct News(SignalFd);

impl News {
    /// Starts to listen. The calling thread must have `SIGCHLD` blocked.
    pub fn new() -> Result<Self> {
        let mut set = SigSet::empty();
        set.add(Signal::SIGCHLD);
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        SignalFd::with_flags(&set, flags)
            .map(Self)
            .map_err(|errno| KernelError::from_errno("create signalfd", errno as i32))
    }

    /// Waits for news, for one of `others` to become readable, or for `limit` to pass. Returns
    /// which of `others` are readable.
    pub fn wait(
        &self,
        others: &[std::os::fd::BorrowedFd<'_>],
        limit: Duration,
    ) -> Result<Vec<bool>> {
        let mut polls = vec![PollFd::new(self.0.as_fd(), PollFlags::POLLIN)];
        polls.extend(others.iter().map(|fd| PollFd::new(*fd, PollFlags::POLLIN)));
        match ppoll(&mut polls, Some(TimeSpec::from_duration(limit)), None) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(errno) => return Err(KernelError::from_errno("wait for news", errno as i32)),
        }
        while let Ok(Some(_)) = self.0.read_signal() {}
        Ok(polls[1..].iter().map(|poll| poll.any().unwrap_or(false)).collect())
    }
}
