//! Threads of a stopped guest: registers, and what only the thread itself can be asked.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use hotspare_image::memory::GuestAddr;
use hotspare_image::tree::{
    Credentials, QueuedSignal, Restart, Scheduling, Seccomp, SeccompFilter, Thread as ThreadImage,
};
use hotspare_kernel::ptrace::{self, Registers, reg};
use hotspare_kernel::remote::{Call, Detour, Stub};
use hotspare_kernel::thread_info::{self, Status};
use hotspare_kernel::{HostPid, memory};

use super::asleep::{self, Asleep};
use crate::guest::{Held, SYSCALL_BYTES, SeenRestart, Thread, restart_of};
use crate::objects::error::{ObjectError, ObjectResult};

const RESTART_BLOCK: i64 = -516;
const RESTART_SYSCALL: i64 = libc::SYS_restart_syscall;

/// Calls a thread makes about itself; see [`ask`].
pub const CALLS: usize = 5;

/// Scratch bytes [`ask`] uses.
pub const SCRATCH: u64 = 64;

/// The calls that tell what cannot be seen from outside, with results in `scratch`.
pub fn ask(scratch: u64) -> [Call; CALLS] {
    let get = |what: i32, to: u64| Call::new(libc::SYS_prctl, &[what as u64, to, 0, 0, 0]);
    [
        Call::new(libc::SYS_sigaltstack, &[0, scratch]),
        get(libc::PR_GET_TID_ADDRESS, scratch + 24),
        get(libc::PR_GET_PDEATHSIG, scratch + 32),
        get(libc::PR_GET_TIMERSLACK, 0),
        get(libc::PR_GET_SECUREBITS, 0),
    ]
}

/// Answers of [`ask`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Answers {
    alternate_stack: [u64; 3],
    clear_tid: u64,
    parent_death_signal: i32,
    timer_slack_ns: u64,
    securebits: u32,
}

impl Answers {
    /// Reads them from the stub's memory.
    pub fn read(calls: &[Call], stub: &Stub, offset: usize) -> ObjectResult<Self> {
        calls[0].value("read alternate signal stack")?;
        calls[1].value("read thread address")?;
        calls[2].value("read parent death signal")?;
        let word = |index: usize| stub.memory().read_u64(offset + index * 8);
        Ok(Self {
            // struct stack_t: ss_sp, ss_flags (int, padded), ss_size.
            alternate_stack: [word(0), word(1) & 0xffff_ffff, word(2)],
            clear_tid: word(3),
            parent_death_signal: word(4) as i32,
            timer_slack_ns: calls[3].value("read timer slack")?,
            securebits: calls[4].value("read securebits")? as u32,
        })
    }
}

/// What was read of a thread's registers before it left its road.
#[derive(Debug)]
pub struct Visit {
    /// None for a thread in a job-control stop, which cannot be led off its road.
    pub(crate) detour: Option<Detour>,
    /// With what it is put back if it sleeps.
    asleep: Option<Registers>,
    registers: Registers,
    signal_mask: u64,
    extended: Vec<u8>,
    rseq: [u64; 4],
}

impl Visit {
    /// Reads the registers of a stopped thread and takes it off its road.
    pub fn begin(thread: &Thread) -> ObjectResult<Self> {
        let tid = thread.tid;
        let mut extended = Vec::new();
        ptrace::extended_registers(tid, &mut extended)?;
        let rseq = ptrace::rseq(tid)?;
        leave_critical_section(tid, rseq[0])?;
        if let Some(Held::Group(_)) = thread.held {
            let (registers, signal_mask) = (ptrace::registers(tid)?, ptrace::signal_mask(tid)?);
            let (detour, asleep) = (None, None);
            return Ok(Self { detour, asleep, registers, signal_mask, extended, rseq });
        }
        let detour = Detour::begin(tid)?;
        let (registers, signal_mask) = (*detour.registers(), detour.mask());
        let asleep = asleep::lull(thread, &registers);
        Ok(Self { detour: Some(detour), asleep, registers, signal_mask, extended, rseq })
    }

    /// Puts the thread back on its road.
    pub fn put_back(&mut self) -> ObjectResult<()> {
        let Some(detour) = self.detour.take() else { return Ok(()) };
        let registers = self.asleep.unwrap_or(self.registers);
        Ok(detour.end_with(&registers)?)
    }

    /// Says what the thread is.
    pub fn describe(
        self,
        thread: &mut Thread,
        status: &Status,
        answers: &Answers,
    ) -> ObjectResult<ThreadImage> {
        let tid = thread.tid;
        let restart =
            note_restart(thread, &self.registers).or_else(|| restart_of(thread, &self.registers));
        let (scheduling, io_priority) = scheduling(tid)?;
        let image = ThreadImage {
            tid: thread.guest_tid,
            registers: self.registers,
            extended: self.extended,
            signal_mask: self.signal_mask,
            pending: pending(thread, status)?,
            alternate_stack: answers.alternate_stack,
            robust_list: thread_info::robust_list(tid)?,
            clear_tid: GuestAddr(answers.clear_tid),
            rseq: self.rseq,
            credentials: credentials(status, answers.securebits),
            name: status.name.clone(),
            scheduling,
            seccomp: seccomp(tid, status)?,
            parent_death_signal: answers.parent_death_signal,
            timer_slack_ns: answers.timer_slack_ns,
            io_priority,
            restart,
        };
        thread.asleep = self.asleep.map(|registers| Asleep::new(registers, &image));
        Ok(image)
    }
}

/// How a thread is scheduled, and its I/O priority.
pub(crate) fn scheduling(tid: HostPid) -> ObjectResult<(Scheduling, i32)> {
    let (policy, priority, nice, reset_on_fork) = thread_info::scheduling(tid)?;
    let affinity = affinity(tid)?;
    let scheduling = Scheduling { policy, priority, nice, affinity, reset_on_fork };
    Ok((scheduling, thread_info::io_priority(tid)?))
}

/// Affinity, empty where the thread may run on every processor of the host.
fn affinity(tid: HostPid) -> ObjectResult<Vec<u64>> {
    let mask = thread_info::affinity(tid)?;
    let allowed: u32 = mask.iter().map(|word| word.count_ones()).sum();
    // Asking for it reads a dozen files.
    static ALL: OnceLock<u32> = OnceLock::new();
    let all = *ALL
        .get_or_init(|| std::thread::available_parallelism().map_or(0, |count| count.get() as u32));
    Ok(if allowed >= all { Vec::new() } else { mask })
}

fn credentials(status: &Status, securebits: u32) -> Credentials {
    Credentials {
        uids: status.uids,
        gids: status.gids,
        groups: status.groups.clone(),
        capabilities: status.capabilities,
        securebits,
        no_new_privs: status.no_new_privs,
    }
}

fn seccomp(tid: HostPid, status: &Status) -> ObjectResult<Seccomp> {
    let mut filters = Vec::new();
    for index in (0..status.seccomp_filters as usize).rev() {
        let program = ptrace::seccomp_filter(tid, index)?.ok_or_else(|| {
            ObjectError::refused(format!("thread {tid}"), "its seccomp filter cannot be read")
        })?;
        filters.push(SeccompFilter { program, flags: 0 });
    }
    Ok(Seccomp { mode: status.seccomp, filters })
}

fn pending(thread: &Thread, status: &Status) -> ObjectResult<Vec<QueuedSignal>> {
    let delivered = about_to_be_delivered(thread);
    let queued = if status.pending[0] == 0 { Vec::new() } else { queued(thread)? };
    Ok(delivered.into_iter().chain(queued).collect())
}

/// The signal that a thread was stopped with.
pub(super) fn about_to_be_delivered(thread: &Thread) -> Option<QueuedSignal> {
    match &thread.held {
        Some(Held::Signal { info, .. }) if !ptrace::is_fault(info) => Some(image_of(info)),
        _ => None,
    }
}

fn image_of(info: &[u8; 128]) -> QueuedSignal {
    QueuedSignal { siginfo: info.to_vec() }
}

/// Signals that wait for a thread.
pub(crate) fn queued(thread: &Thread) -> ObjectResult<Vec<QueuedSignal>> {
    let mut all = ptrace::queued_signals(thread.tid, false)?;
    all.retain(|info| !ptrace::is_fault(info));
    Ok(all.iter().map(image_of).collect())
}

/// The kernel forgets which call it is that `restart_syscall` goes on with, so it is noted at the
/// first interruption, which may be any stop; the arguments stay in the registers.
pub(crate) fn note_restart(thread: &mut Thread, registers: &Registers) -> Option<Restart> {
    thread.restart = seen_restart(thread.restart, registers);
    let seen = thread.restart?;
    Some(Restart { blocked_ns: seen.since.elapsed().as_nanos() as u64, call: seen.call })
}

fn seen_restart(before: Option<SeenRestart>, registers: &Registers) -> Option<SeenRestart> {
    if registers[reg::RAX] as i64 != RESTART_BLOCK || registers[reg::ORIG_RAX] as i64 == -1 {
        return None;
    }
    match registers[reg::ORIG_RAX] as i64 {
        RESTART_SYSCALL => before.filter(|seen| {
            seen.registers[reg::RIP] == registers[reg::RIP] && same_arguments(seen, registers)
        }),
        // The call itself, not its restart: it has just begun, however alike the last one was.
        call => Some(SeenRestart { registers: *registers, call, since: Instant::now() }),
    }
}

fn same_arguments(seen: &SeenRestart, registers: &Registers) -> bool {
    [reg::RSP, reg::RDI, reg::RSI, reg::RDX, reg::R10, reg::R8, reg::R9]
        .iter()
        .all(|&index| seen.registers[index] == registers[index])
}

/// The registers of a thread that is about to enter `restart_syscall`, as they are within: a stop
/// can come between the kernel's putting it back and its first instruction. Nobody else calls
/// that (restart_syscall(2)). With these the kernel puts it back once more.
pub(crate) fn within_restart(
    before: Option<SeenRestart>,
    registers: &Registers,
) -> Option<Registers> {
    let seen = before.filter(|seen| same_arguments(seen, registers))?;
    let behind = registers[reg::RIP].wrapping_add(SYSCALL_BYTES);
    let about_to =
        registers[reg::RAX] as i64 == RESTART_SYSCALL && behind == seen.registers[reg::RIP];
    let mut within = *registers;
    within[reg::RIP] = behind;
    within[reg::RAX] = RESTART_BLOCK as u64;
    within[reg::ORIG_RAX] = RESTART_SYSCALL as u64;
    about_to.then_some(within)
}

/// What the image says of an interrupted call, for the thread that goes on with it.
pub(crate) fn restart_again(image: &ThreadImage) -> Option<SeenRestart> {
    let Restart { blocked_ns, call } = image.restart?;
    let registers = image.registers;
    if registers[reg::RAX] as i64 != RESTART_BLOCK {
        return None;
    }
    let now = Instant::now();
    let since = now.checked_sub(Duration::from_nanos(blocked_ns)).unwrap_or(now);
    Some(SeenRestart { registers, call, since })
}

/// A thread stopped inside a restartable sequence would find the sequence forgotten when it comes
/// back from the stub, so it is sent to the abort handler as the kernel would (rseq(2)). Says
/// whether its registers have changed by that.
pub(super) fn leave_critical_section(tid: HostPid, rseq: u64) -> ObjectResult<bool> {
    if rseq == 0 {
        return Ok(false);
    }
    let section = read_words::<1>(tid, rseq + 8)?[0];
    if section == 0 {
        return Ok(false);
    }
    let [_, start, length, abort] = read_words::<4>(tid, section)?;
    let mut registers = ptrace::registers(tid)?;
    let inside = registers[reg::RIP].wrapping_sub(start) < length;
    if inside {
        registers[reg::RIP] = abort;
        ptrace::set_registers(tid, &registers)?;
        memory::write(tid, &[(rseq + 8, 8)], &[0; 8])?;
    }
    Ok(inside)
}

fn read_words<const N: usize>(tid: HostPid, address: u64) -> ObjectResult<[u64; N]> {
    let mut bytes = vec![0u8; N * 8];
    memory::read(tid, &[(address, N * 8)], &mut bytes)?;
    let mut words = [0; N];
    for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = u64::from_ne_bytes(bytes.try_into().expect("eight bytes"));
    }
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interrupted(call: i64) -> Registers {
        let mut registers: Registers = [7; 27];
        registers[reg::RIP] = 0x40_1002;
        registers[reg::RAX] = RESTART_BLOCK as u64;
        registers[reg::ORIG_RAX] = call as u64;
        registers
    }

    #[test]
    fn an_interrupted_call_is_known_by_its_restart_also_before_that_has_begun() {
        let (first, again) = (interrupted(libc::SYS_poll), interrupted(RESTART_SYSCALL));
        let seen = seen_restart(None, &first).expect("is one");
        assert_eq!(seen.call, libc::SYS_poll);
        assert_eq!(seen_restart(Some(seen), &again).expect("the same").call, libc::SYS_poll);
        assert!(seen_restart(None, &again).is_none(), "nobody knows what it goes on with");
        // Put back by the kernel, and stopped before it has begun.
        let mut about_to = first;
        about_to[reg::RIP] -= SYSCALL_BYTES;
        about_to[reg::RAX] = RESTART_SYSCALL as u64;
        assert_eq!(within_restart(Some(seen), &about_to), Some(again));
        about_to[reg::ORIG_RAX] = u64::MAX;
        assert_eq!(within_restart(Some(seen), &about_to), Some(again));
        assert_eq!(within_restart(None, &about_to), None);
        about_to[reg::RDI] = 8;
        assert_eq!(within_restart(Some(seen), &about_to), None, "another call");
        assert_eq!(within_restart(Some(seen), &first), None);
    }
}
