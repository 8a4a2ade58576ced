//! Stopping all of the guest at one instant, and letting it go on.

use std::time::{Duration, Instant};

use hotspare_kernel::ptrace::{self, Stop, Waited, Whose};
use hotspare_kernel::{HostPid, thread_info};

use super::register::Thread;
use super::waits::Next;
use super::{Guest, gone_is_fine, was_there};
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
/// Longest wait for one that could stop if it had a processor. On a crowded host that may be long,
/// and no sooner at the next attempt.
const CROWDED_LIMIT: Duration = Duration::from_millis(200);
/// From so many threads on news of each is asked for by its number: for news of anybody the kernel
/// goes through the list of all, again and again from its beginning.
const MANY_THREADS: usize = 16;
/// So often in a row a stop is put off because of a vfork(2) under way, which is mostly short.
const VFORK_REFUSALS: u32 = 3;

impl Guest {
    /// Stops every thread. On failure those that stopped run on.
    ///
    /// A thread in vfork(2) cannot be stopped before its child calls execve. That is a passing
    /// state, reported as [`ObjectError::Transient`]; but to a guest that is in it most of the time
    /// it happens again and again, and then the stop waits for the child.
    pub(crate) fn stop_all(&mut self) -> ObjectResult<()> {
        let stopped = self.try_stop_all();
        if stopped.is_err() {
            self.resume_all()?;
        }
        stopped
    }

    fn try_stop_all(&mut self) -> ObjectResult<()> {
        self.put_off_for_vfork()?;
        let to_stop = self.threads.keys().filter(|tid| !self.keeps_parent(**tid));
        let to_stop: Vec<HostPid> = to_stop.copied().collect();
        for tid in &to_stop {
            gone_is_fine(ptrace::interrupt(*tid))?;
        }
        let begin = Instant::now();
        let mut deadline = begin + STOP_LIMIT;
        if to_stop.len() >= MANY_THREADS {
            self.hold_each(to_stop, deadline)?;
        }
        while self.threads.values().any(|thread| thread.held.is_none()) {
            match ptrace::wait(Whose::Any, false)? {
                Waited::Nothing if Instant::now() > deadline => {
                    if begin.elapsed() > CROWDED_LIMIT || !self.want_processors() {
                        return Err(self.stubborn());
                    }
                    deadline += STOP_LIMIT;
                }
                Waited::Nothing => drop(self.news.wait(&[], Duration::from_millis(1))?),
                Waited::NoChildren => return Ok(()),
                Waited::Ended(tid, status) => self.note_end(tid, status),
                Waited::Stopped(tid, stop) => self.hold(tid, stop)?,
            }
        }
        self.vfork_refusals = 0;
        Ok(())
    }

    /// Holds these threads as they stop. Some may be left: those that became others (execve), and
    /// those that are late.
    fn hold_each(&mut self, mut left: Vec<HostPid>, deadline: Instant) -> ObjectResult<()> {
        while !left.is_empty() && Instant::now() < deadline {
            let before = left.len();
            for tid in std::mem::take(&mut left) {
                match ptrace::wait(Whose::One(tid), false)? {
                    Waited::Nothing => {}
                    Waited::NoChildren => continue,
                    Waited::Ended(tid, status) => self.note_end(tid, status),
                    Waited::Stopped(tid, stop) => self.hold(tid, stop)?,
                }
                if self.threads.get(&tid).is_some_and(|thread| thread.held.is_none()) {
                    left.push(tid);
                }
            }
            if left.len() == before {
                self.news.wait(&[], Duration::from_millis(1))?;
            }
        }
        Ok(())
    }

    fn put_off_for_vfork(&mut self) -> ObjectResult<()> {
        let Some(thread) = self.threads.values().find(|thread| thread.in_vfork) else {
            return Ok(());
        };
        if self.vfork_refusals >= VFORK_REFUSALS {
            return Ok(());
        }
        self.vfork_refusals += 1;
        let what = format!("thread {}", thread.guest_tid);
        Err(ObjectError::transient(what, "waits for the child of a vfork"))
    }

    /// Whether this thread must run for its parent to come out of vfork(2).
    fn keeps_parent(&self, tid: HostPid) -> bool {
        let thread = self.threads.get(&tid);
        let process = thread.and_then(|thread| self.processes.get(&thread.process));
        process.is_some_and(|process| process.keeps_parent)
    }

    /// Whether the threads that have not stopped yet only wait for processors.
    fn want_processors(&self) -> bool {
        let mut late = self.threads.values().filter(|thread| thread.held.is_none());
        late.all(|thread| {
            !thread.in_vfork
                && thread_info::status(thread.tid).is_ok_and(|status| status.state == b'R')
        })
    }

    fn stubborn(&self) -> ObjectError {
        let thread = self.threads.values().find(|thread| thread.held.is_none());
        let tid = thread.map_or(0, |thread| thread.guest_tid.0);
        let in_vfork = thread.is_some_and(|thread| thread.in_vfork);
        let state = if in_vfork { ", waiting for the child of a vfork" } else { "" };
        ObjectError::transient(format!("thread {tid}"), format!("did not stop in time{state}"))
    }

    /// Keeps a thread that stopped; one that stopped inside fork, vfork or execve is asked again,
    /// since it is still in the middle of the call.
    fn hold(&mut self, tid: HostPid, stop: Stop) -> ObjectResult<()> {
        self.note_stop(tid, stop)?;
        if self.keeps_parent(tid) {
            return self.go_on(tid, stop);
        }
        if let Stop::Born { child, .. } = stop
            && self.keeps_parent(child)
            && let Some(early) = self.threads.get_mut(&child)
        {
            // It was heard of before its birth.
            release(early)?;
        }
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
            thread.held = Some(held);
        }
        match held {
            Held::Trap | Held::Signal { .. } => self.settle(tid, Next::GoOn),
            Held::Group(_) => Ok(()),
        }
    }

    /// Lets every stopped thread go on as it would have. Returns whether all of them had stood
    /// still until now: one that was killed meanwhile had begun to leave, and memory shows that.
    pub(crate) fn resume_all(&mut self) -> ObjectResult<bool> {
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
        let mut stood_still = true;
        for thread in self.threads.values_mut() {
            stood_still &= release(thread)?;
        }
        self.plan_kick();
        Ok(stood_still)
    }

    /// Whether all threads still stand still.
    pub(crate) fn all_stand_still(&self) -> ObjectResult<bool> {
        for tid in self.threads.keys() {
            if !was_there(ptrace::signal_info(*tid).map(drop))? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Lets a thread go on; false if it is not stopped any more, since it was killed.
fn release(thread: &mut Thread) -> ObjectResult<bool> {
    was_there(match thread.held.take() {
        None => Ok(()),
        Some(Held::Trap) => ptrace::cont(thread.tid, 0),
        Some(Held::Signal { signal, info }) => ptrace::set_signal_info(thread.tid, &info)
            .and_then(|()| ptrace::cont(thread.tid, signal)),
        Some(Held::Group(_)) => ptrace::listen(thread.tid),
    })
}
