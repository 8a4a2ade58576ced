//! Waits that a stop has ended, and that are made again so that the program does not see it.
//!
//! Linux ends some calls with `EINTR` when a tracer stops the thread, and does not restart them
//! (signal(7), "Interruption of system calls and library functions by stop signals"). The thread is
//! put back to before the call. All its registers stay, so the call has its whole time again: when
//! that is over counted from the first stop, the thread is stopped once more
//! ([`Guest::kick_late`]) and gets the call's answer for "too late". A wait that is met for the
//! first time may last too long by an epoch: nobody knows when it began.
//!
//! A signal that is delivered before the call has begun again would not end it: it is seen on its
//! way, and the call gets its `EINTR` after all. Signals that only wait are left alone: the call
//! may have let in for its time what is blocked otherwise (epoll_pwait(2)), and our calls in the
//! thread end that time, so only the call itself can say what is to be delivered.
//!
//! Whether it is the same wait when it is seen again is told by the thread's flags: it is put back
//! with [`MARK`], which the next computation of the program destroys.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use hotspare_image::Checkpoint;
use hotspare_image::tree::{ProcessState, Restart};
use hotspare_kernel::ptrace::{self, Registers, reg};
use hotspare_kernel::{HostPid, memory, pidfd, socket, thread_info};

use super::{Guest, Thread, gone_is_fine};
use crate::capture::threads::{note_restart, restart_again, within_restart};
use crate::objects::error::ObjectResult;

/// Carry, auxiliary carry, zero, sign and overflow, without parity: no result is zero and negative
/// at once. A system call keeps the flags, and programs take them as spoilt by it.
const MARK: u64 = 0x8d1;
const MARK_BITS: u64 = MARK | 4;
pub(crate) const SYSCALL_BYTES: u64 = 2;

/// A wait that was made again.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MadeAgain {
    /// The thread as it was put back.
    registers: Registers,
    since: Instant,
    /// When it has to end, if ever.
    end: Option<Instant>,
    /// What the call answers then.
    late: i32,
}

/// How long a call waits, and what it answers when that is over.
struct Limit {
    time: Option<Duration>,
    late: i32,
}

/// What a stopped thread is about to do.
pub(crate) enum Next {
    /// Go on.
    GoOn,
    /// Have this signal delivered.
    Signal(i32),
}

/// Puts a stopped thread back to before a wait that a stop has ended. One that was put back gets
/// its answer when its time is over, or when a signal comes that the program acts on. Returns the
/// registers it has then.
pub(crate) fn settle(
    thread: &mut Thread,
    process: &OwnedFd,
    registers: &Registers,
    next: Next,
) -> hotspare_kernel::Result<Registers> {
    let tid = thread.tid;
    let again = thread.made_again.take();
    if let Some(again) = again.filter(|again| again.registers == *registers) {
        // It has not begun again yet.
        let answer = if next.ends_wait(tid)? {
            -libc::EINTR
        } else if again.is_late() {
            again.late
        } else {
            thread.made_again = Some(again);
            return Ok(*registers);
        };
        let mut ended = *registers;
        ended[reg::RIP] = registers[reg::RIP].wrapping_add(SYSCALL_BYTES);
        return answer_with(tid, ended, answer);
    }
    if registers[reg::RAX] as i64 != i64::from(-libc::EINTR) {
        return Ok(*registers);
    }
    let Some(limit) = limit(tid, process, registers[reg::ORIG_RAX] as i64, registers)? else {
        return Ok(*registers);
    };
    if next.ends_wait(tid)? {
        return Ok(*registers);
    }
    let now = Instant::now();
    let seen = again.filter(|again| {
        registers[reg::EFLAGS] & MARK_BITS == MARK && same_call(&again.registers, registers)
    });
    if seen.is_none() {
        // It is put back like the one before it, and yet has executed something since.
        thread.asleep = None;
    }
    let again = MadeAgain {
        registers: put_back(registers),
        since: seen.map_or(now, |seen| seen.since),
        end: seen.map_or(limit.time.map(|time| now + time), |seen| seen.end),
        late: limit.late,
    };
    if again.is_late() {
        return answer_with(tid, *registers, again.late);
    }
    thread.made_again = Some(again);
    ptrace::set_registers(tid, &again.registers)?;
    Ok(again.registers)
}

/// What the image says of a thread that was put back.
pub(crate) fn restart_of(thread: &Thread, registers: &Registers) -> Option<Restart> {
    let again = thread.made_again.filter(|again| again.registers == *registers)?;
    let blocked_ns = again.since.elapsed().as_nanos() as u64;
    Some(Restart { blocked_ns, call: registers[reg::RAX] as i64 })
}

impl MadeAgain {
    fn is_late(&self) -> bool {
        self.end.is_some_and(|end| end <= Instant::now())
    }
}

fn put_back(registers: &Registers) -> Registers {
    let mut next = *registers;
    next[reg::RIP] = registers[reg::RIP].wrapping_sub(SYSCALL_BYTES);
    next[reg::RAX] = registers[reg::ORIG_RAX];
    next[reg::ORIG_RAX] = u64::MAX;
    marked(next)
}

/// With the mark in the flags.
pub(crate) fn marked(mut registers: Registers) -> Registers {
    registers[reg::EFLAGS] = registers[reg::EFLAGS] & !MARK_BITS | MARK;
    registers
}

fn answer_with(
    tid: HostPid,
    mut registers: Registers,
    answer: i32,
) -> hotspare_kernel::Result<Registers> {
    registers[reg::RAX] = i64::from(answer) as u64;
    registers[reg::ORIG_RAX] = u64::MAX;
    ptrace::set_registers(tid, &registers)?;
    Ok(registers)
}

/// Whether a call seen after it was ended is the one that was put back.
fn same_call(before: &Registers, after: &Registers) -> bool {
    before[reg::RAX] == after[reg::ORIG_RAX]
        && before[reg::RIP].wrapping_add(SYSCALL_BYTES) == after[reg::RIP]
        && [reg::RSP, reg::RDI, reg::RSI, reg::RDX, reg::R10, reg::R8, reg::R9]
            .iter()
            .all(|&index| before[index] == after[index])
}

impl Next {
    /// Whether it ends a wait: a signal that the program does not ignore. (A traced thread is told
    /// of ignored ones, too.) One that is blocked by now came while the wait had let it in, and
    /// will do so again.
    fn ends_wait(&self, tid: HostPid) -> hotspare_kernel::Result<bool> {
        const IGNORED: [i32; 4] = [libc::SIGCHLD, libc::SIGCONT, libc::SIGURG, libc::SIGWINCH];
        let Self::Signal(signal) = *self else { return Ok(false) };
        let bit = |signal: i32| 1u64 << (signal - 1);
        let [blocked, ignored, caught] = thread_info::status(tid)?.signals;
        let by_default = IGNORED.into_iter().map(bit).sum::<u64>() & !caught;
        Ok(bit(signal) & !(blocked | ignored | by_default) != 0)
    }
}

/// How long the call in these registers waits; `None` for one that is not ours to make again.
fn limit(
    tid: HostPid,
    process: &OwnedFd,
    call: i64,
    registers: &Registers,
) -> hotspare_kernel::Result<Option<Limit>> {
    let timed = |pointer: usize, late: i32| match registers[pointer] {
        0 => Ok(Some(Limit { time: None, late })),
        address => read_time(tid, address, 1).map(|time| Some(Limit { time: Some(time), late })),
    };
    match call {
        libc::SYS_epoll_wait | libc::SYS_epoll_pwait => {
            let ms = u64::try_from(registers[reg::R10] as i32).ok();
            Ok(Some(Limit { time: ms.map(Duration::from_millis), late: 0 }))
        }
        libc::SYS_epoll_pwait2 => timed(reg::R10, 0),
        libc::SYS_semtimedop => timed(reg::R10, -libc::EAGAIN),
        libc::SYS_semop => Ok(Some(Limit { time: None, late: 0 })),
        libc::SYS_rt_sigtimedwait => timed(reg::RDX, -libc::EAGAIN),
        libc::SYS_read
        | libc::SYS_readv
        | libc::SYS_recvfrom
        | libc::SYS_recvmsg
        | libc::SYS_recvmmsg
        | libc::SYS_accept
        | libc::SYS_accept4 => {
            Ok(socket_limit(process, registers, libc::SO_RCVTIMEO, -libc::EAGAIN))
        }
        libc::SYS_write
        | libc::SYS_writev
        | libc::SYS_sendto
        | libc::SYS_sendmsg
        | libc::SYS_sendmmsg => {
            Ok(socket_limit(process, registers, libc::SO_SNDTIMEO, -libc::EAGAIN))
        }
        libc::SYS_connect => {
            Ok(socket_limit(process, registers, libc::SO_SNDTIMEO, -libc::EINPROGRESS))
        }
        _ => Ok(None),
    }
}

/// Seconds and a fraction, as the guest has them in its memory.
fn read_time(tid: HostPid, address: u64, unit_ns: u64) -> hotspare_kernel::Result<Duration> {
    let mut bytes = [0u8; 16];
    memory::read(tid, &[(address, 16)], &mut bytes)?;
    Ok(time_of(&bytes, unit_ns))
}

fn time_of(bytes: &[u8; 16], unit_ns: u64) -> Duration {
    let word = |at: usize| u64::from_ne_bytes(std::array::from_fn(|index| bytes[at + index]));
    let ns = word(8).saturating_mul(unit_ns);
    Duration::from_secs(word(0)).saturating_add(Duration::from_nanos(ns))
}

/// The time limit of a socket (socket(7)); `None` for what has none, or is no socket.
fn socket_limit(process: &OwnedFd, registers: &Registers, option: i32, late: i32) -> Option<Limit> {
    let fd = pidfd::get_fd(process.as_fd(), registers[reg::RDI] as i32).ok()?;
    let mut bytes = [0u8; 16];
    socket::get_option(fd.as_fd(), libc::SOL_SOCKET, option, &mut bytes).ok()?;
    let time = time_of(&bytes, 1000);
    (!time.is_zero()).then_some(Limit { time: Some(time), late })
}

impl Guest {
    /// Settles a thread that has just stopped.
    pub(super) fn settle(&mut self, tid: HostPid, next: Next) -> ObjectResult<()> {
        let Some(thread) = self.threads.get_mut(&tid) else { return Ok(()) };
        let Some(process) = self.processes.get(&thread.process) else { return Ok(()) };
        if let Next::Signal(_) = next {
            // It may run a handler, which ends as if nothing had been.
            thread.asleep = None;
        }
        let settled = ptrace::registers(tid).and_then(|registers| {
            let registers = match within_restart(thread.restart, &registers) {
                Some(within) => {
                    ptrace::set_registers(tid, &within)?;
                    within
                }
                None => registers,
            };
            note_restart(thread, &registers);
            thread.stopped = settle(thread, &process.pidfd, &registers, next)?;
            Ok(())
        });
        if let Some(end) = thread.made_again.and_then(|again| again.end) {
            self.kick = Some(self.kick.map_or(end, |kick| kick.min(end)));
        }
        gone_is_fine(settled)
    }

    /// Works out when the next wait is late.
    pub(super) fn plan_kick(&mut self) {
        let now = Instant::now();
        let ends = self.threads.values().filter_map(|thread| thread.made_again?.end);
        self.kick = ends.filter(|end| *end > now).min();
    }

    /// Stops the threads whose waits are late, so that [`settle`] can end them.
    pub(super) fn kick_late(&mut self) -> ObjectResult<()> {
        if self.kick.is_none_or(|kick| kick > Instant::now()) {
            return Ok(());
        }
        for thread in self.threads.values() {
            if thread.made_again.is_some_and(|again| again.is_late()) {
                gone_is_fine(ptrace::interrupt(thread.tid))?;
            }
        }
        self.plan_kick();
        Ok(())
    }

    /// Takes over from the image which calls the threads of an adopted tree are in: those that go
    /// on where they were interrupted, and waits that were put back, and when they end.
    pub fn adopt_waits(&mut self, image: &Checkpoint) -> ObjectResult<()> {
        let alive = image.processes.iter().filter_map(|process| match &process.state {
            ProcessState::Alive(live) => Some((process.pid, live)),
            ProcessState::Zombie { .. } => None,
        });
        let now = Instant::now();
        for (pid, live) in alive {
            let Some(process) = self.processes.values().find(|one| one.guest_pid == pid) else {
                continue;
            };
            for image in &live.threads {
                let registers = &image.registers;
                let Some(Restart { blocked_ns, call }) = image.restart else { continue };
                let mut threads = self.threads.values_mut();
                let own =
                    threads.find(|one| one.process == process.pid && one.guest_tid == image.tid);
                let Some(thread) = own else { continue };
                thread.restart = restart_again(image);
                if registers[reg::EFLAGS] & MARK_BITS != MARK {
                    continue;
                }
                let found = limit(thread.tid, &process.pidfd, call, registers);
                let Ok(Some(Limit { time, late })) = found else { continue };
                let blocked = Duration::from_nanos(blocked_ns);
                thread.made_again = Some(MadeAgain {
                    registers: *registers,
                    since: now.checked_sub(blocked).unwrap_or(now),
                    end: time.map(|time| now + time.saturating_sub(blocked)),
                    late,
                });
            }
        }
        self.plan_kick();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_that_was_put_back_is_known_again_by_its_mark() {
        let mut ended: Registers = [0; 27];
        ended[reg::RIP] = 0x40_1002;
        ended[reg::RAX] = -i64::from(libc::EINTR) as u64;
        ended[reg::ORIG_RAX] = libc::SYS_semtimedop as u64;
        ended[reg::EFLAGS] = 0x246;
        let again = put_back(&ended);
        assert_eq!((again[reg::RIP], again[reg::RAX] as i64), (0x40_1000, libc::SYS_semtimedop));
        assert_eq!(again[reg::EFLAGS] & MARK_BITS, MARK);
        assert_eq!(again[reg::EFLAGS] & !MARK_BITS, ended[reg::EFLAGS] & !MARK_BITS);
        assert!(same_call(&again, &ended));
        let mut other = ended;
        other[reg::R10] = 1;
        assert!(!same_call(&again, &other));
    }

    #[test]
    fn the_mark_is_zero_and_negative_at_once() {
        const ZERO: u64 = 1 << 6;
        const SIGN: u64 = 1 << 7;
        assert_eq!(MARK & (ZERO | SIGN), ZERO | SIGN);
    }

    #[test]
    fn times_of_the_guest_do_not_overflow() {
        let mut bytes = [0xff; 16];
        assert_eq!(time_of(&bytes, 1000), Duration::MAX);
        bytes[..8].copy_from_slice(&3u64.to_ne_bytes());
        bytes[8..].copy_from_slice(&500_000u64.to_ne_bytes());
        assert_eq!(time_of(&bytes, 1000), Duration::from_millis(3500));
    }
}
