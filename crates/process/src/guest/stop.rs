//! Stopping all of the guest at one instant, and letting it go on.

use std::time::{Duration, Instant};

use hotspare_kernel::HostPid;
use hotspare_kernel::ptrace::{self, Registers, Stop, Waited, Whose, reg};

use super::{Guest, Thread, gone_is_fine};
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
                gone_is_fine(wait_on(thread, registers))?;
            }
            thread.held = Some(held);
        }
        Ok(())
    }

    /// Lets every stopped thread go on as it would have.
    pub(crate) fn resume_all(&mut self) -> ObjectResult<()> {
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
        Ok(())
    }
}

/// A wait for events that was made again, for the rest of its time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MadeAgain {
    /// As it was made, so that it is known when it is seen again.
    registers: Registers,
    /// When it has to end.
    end: Instant,
}

/// Some calls are ended by a stop with `EINTR` and not restarted by Linux (signal(7), "Interruption
/// of system calls and library functions by stop signals"). If no signal has come, the call is made
/// again, so that the program does not see our stop: where it waits without end, or waits for
/// events, whose timeout is in a register. Others see what Linux documents: their timeout is in
/// memory that is not ours to change.
///
/// A wait that is met for the first time may last an epoch too long: nobody knows when it began.
fn wait_on(thread: &mut Thread, registers: Registers) -> hotspare_kernel::Result<()> {
    let (tid, again) = (thread.tid, thread.made_again.take());
    let call = registers[reg::ORIG_RAX] as i64;
    if registers[reg::RAX] as i64 != i64::from(-libc::EINTR) {
        return Ok(());
    }
    let mut next = registers;
    let mut end = None;
    match call {
        libc::SYS_epoll_wait | libc::SYS_epoll_pwait => {
            if let Ok(timeout_ms) = u64::try_from(registers[reg::R10] as i32) {
                let now = Instant::now();
                let seen = again.filter(|again| same_call(&again.registers, &registers));
                let due = seen.map_or(now + Duration::from_millis(timeout_ms), |seen| seen.end);
                let left_ms = due.saturating_duration_since(now).as_millis() as u64;
                // One more than what is left: a new call with the old timeout looks different.
                next[reg::R10] = (left_ms + 1).min(i32::MAX as u64);
                end = Some(due);
            }
        }
        libc::SYS_epoll_pwait2 | libc::SYS_semtimedop if registers[reg::R10] == 0 => {}
        libc::SYS_rt_sigtimedwait if registers[reg::RDX] == 0 => {}
        libc::SYS_semop => {}
        _ => return Ok(()),
    }
    if !ptrace::queued_signals(tid, false)?.is_empty()
        || !ptrace::queued_signals(tid, true)?.is_empty()
    {
        return Ok(());
    }
    thread.made_again = end.map(|end| MadeAgain { registers: next, end });
    const SYSCALL_BYTES: u64 = 2;
    next[reg::RIP] = registers[reg::RIP].wrapping_sub(SYSCALL_BYTES);
    next[reg::RAX] = call as u64;
    next[reg::ORIG_RAX] = u64::MAX;
    ptrace::set_registers(tid, &next)
}

fn same_call(one: &Registers, other: &Registers) -> bool {
    [reg::RIP, reg::RSP, reg::RDI, reg::RSI, reg::RDX, reg::R10, reg::R8, reg::R9]
        .iter()
        .all(|&index| one[index] == other[index])
}
