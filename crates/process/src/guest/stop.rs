//! Stopping all of the guest at one instant, and letting it go on.

use std::time::{Duration, Instant};

use hotspare_kernel::HostPid;
use hotspare_kernel::ptrace::{self, Stop, Waited, Whose};

use super::waits::Next;
use super::{Guest, gone_is_fine};
use crate::objects::error::{ObjectError, ObjectResult};

/// How a stopped thread is held, and so how it goes on.
#[derive(Clone, Copy, Debug)]
pub enum Held {
    /// Between two instructions, or out of an interrupted system call.
    Trap,
    /// A signal was about to be delivered; it still will be.
    Signal {
        /// Number.
        signal: i32,
        /// `siginfo_t`.
        info: [u8; 128],
    },
    /// Stopped by job control.
    Group(i32),
}

/// Longest wait for a thread that does not stop (it sleeps where only SIGKILL reaches).
const STOP_LIMIT: Duration = Duration::from_millis(20);

impl Guest {
    /// Stops every thread. On failure those that stopped run on.
    ///
    /// A thread in vfork(2) cannot be stopped before its child calls execve: that is a passing
    /// state, reported as [`ObjectError::Transient`].
    pub(crate) fn stop_all(&mut self) -> ObjectResult<()> {
        let stopped = self.try_stop_all();
        if stopped.is_err() {
            self.resume_all()?;
        }
        stopped
    }

    fn try_stop_all(&mut self) -> ObjectResult<()> {
        self.refuse_vfork()?;
        for tid in self.threads.keys() {
            gone_is_fine(ptrace::interrupt(*tid))?;
        }
        let deadline = Instant::now() + STOP_LIMIT;
        while self.threads.values().any(|thread| thread.held.is_none()) {
            match ptrace::wait(Whose::Any, false)? {
                Waited::Nothing if Instant::now() > deadline => return Err(self.stubborn()),
                Waited::Nothing => drop(self.news.wait(&[], Duration::from_millis(1))?),
                Waited::NoChildren => return Ok(()),
                Waited::Ended(tid, status) => self.note_end(tid, status),
                Waited::Stopped(tid, stop) => self.hold(tid, stop)?,
            }
            self.refuse_vfork()?;
        }
        Ok(())
    }

    fn refuse_vfork(&self) -> ObjectResult<()> {
        match self.threads.values().find(|thread| thread.in_vfork) {
            Some(thread) => Err(ObjectError::transient(
                format!("thread {}", thread.guest_tid),
                "waits for the child of a vfork",
            )),
            None => Ok(()),
        }
    }

    fn stubborn(&self) -> ObjectError {
        let thread = self.threads.values().find(|thread| thread.held.is_none());
        let tid = thread.map_or(0, |thread| thread.guest_tid.0);
        ObjectError::transient(
            format!("thread {tid}"),
            format!("did not stop within {} ms", STOP_LIMIT.as_millis()),
        )
    }

    /// Keeps a thread that stopped; one that stopped inside fork, vfork or execve is asked again,
    /// since it is still in the middle of the call.
    fn hold(&mut self, tid: HostPid, stop: Stop) -> ObjectResult<()> {
        self.note_stop(tid, stop)?;
        let held = match stop {
            Stop::Interrupted => Held::Trap,
            Stop::Group(signal) => Held::Group(signal),
            Stop::Signal(signal) => match ptrace::signal_info(tid) {
                Ok(info) => Held::Signal { signal, info },
                Err(error) if error.is_died() => return Ok(()),
                Err(error) => return Err(error.into()),
            },
            Stop::Born { .. }
            | Stop::VforkDone
            | Stop::Exec { .. }
            | Stop::Exiting { .. }
            | Stop::Syscall => {
                gone_is_fine(ptrace::cont(tid, 0))?;
                return gone_is_fine(ptrace::interrupt(tid));
            }
        };
        if let Some(thread) = self.threads.get_mut(&tid) {
            if let Held::Trap = held
                && let Ok(registers) = ptrace::registers(tid)
            {
                crate::capture::threads::note_restart(thread, &registers);
            }
            thread.held = Some(held);
        }
        match held {
            Held::Trap | Held::Signal { .. } => self.settle(tid, Next::GoOn),
            Held::Group(_) => Ok(()),
        }
    }

    /// Lets every stopped thread go on as it would have.
    pub(crate) fn resume_all(&mut self) -> ObjectResult<()> {
        let signalled: Vec<_> = self
            .threads
            .values()
            .filter_map(|thread| match thread.held {
                Some(Held::Signal { signal, .. }) => Some((thread.tid, signal)),
                _ => None,
            })
            .collect();
        for (tid, signal) in signalled {
            self.settle(tid, Next::Signal(signal))?;
        }
        for thread in self.threads.values_mut() {
            let resumed = match thread.held.take() {
                None => Ok(()),
                Some(Held::Trap) => ptrace::cont(thread.tid, 0),
                Some(Held::Signal { signal, info }) => ptrace::set_signal_info(thread.tid, &info)
                    .and_then(|()| ptrace::cont(thread.tid, signal)),
                Some(Held::Group(_)) => ptrace::listen(thread.tid),
            };
            gone_is_fine(resumed)?;
        }
        self.plan_kick();
        Ok(())
    }
}
