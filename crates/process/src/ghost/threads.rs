//! What belongs to a thread: name, stacks, lists, scheduling, credentials, filters, registers.

use hotspare_image::tree::{
    Credentials, GuestPid, LiveProcess, Restart, Scheduling, SeccompFilter, Thread,
};
use hotspare_kernel::ptrace::{self, HostPid, Registers, Stop, Waited, Whose, reg};
use hotspare_kernel::remote::{self, Stub};
use hotspare_kernel::{spawn, thread_info};

use super::attributes::{is_from_timer, number_of, siginfo};
use super::body::Body;
use super::error::{GhostError, GhostResult};
use super::hands::{Batch, await_interrupted, unexpected};

const PR_SET_PDEATHSIG: u64 = 1;
const PR_CAPBSET_DROP: u64 = 24;
const PR_SET_SECCOMP: u64 = 22;
const PR_SET_SECUREBITS: u64 = 28;
const PR_SET_NO_NEW_PRIVS: u64 = 38;
const PR_CAP_AMBIENT: u64 = 47;
const PR_CAP_AMBIENT_RAISE: u64 = 2;
const PR_CAP_AMBIENT_CLEAR_ALL: u64 = 4;
/// Changing users leaves capabilities alone: `SECBIT_NO_SETUID_FIXUP`.
const SECBIT_NO_SETUID_FIXUP: u64 = 4;
const LAST_CAPABILITY: u64 = 40;

/// The error with which a system call asks to be restarted through its restart block.
const RESTART_BLOCK: i64 = -516;
const SECCOMP_FILTER_FLAG_TSYNC: u64 = 1;

impl Body {
    /// What of threads needs privilege to set, or takes it away: filters, credentials.
    pub(super) fn dress_fully(&self, threads: &[Thread]) -> GhostResult<()> {
        let shared = shared_filters(threads);
        if let Some(first) = threads.first().filter(|_| shared > 0) {
            // One and the same for all, not only alike: a thread can put another on all of them
            // only if theirs are ancestors of its own (seccomp(2), SECCOMP_FILTER_FLAG_TSYNC).
            for thread in threads {
                ptrace::suspend_seccomp(self.thread(thread.tid)?, true)?;
            }
            let filters = &first.seccomp.filters[..shared];
            self.install(self.thread(first.tid)?, filters, SECCOMP_FILTER_FLAG_TSYNC)?;
        }
        for thread in threads {
            self.dress_thread(self.thread(thread.tid)?, thread, shared)?;
        }
        Ok(())
    }

    fn dress_thread(&self, host: HostPid, thread: &Thread, shared: usize) -> GhostResult<()> {
        self.install_filters(host, thread, shared)?;
        let mut batch = self.hands.batch(host);
        let (own, wanted) = (&self.credentials, &thread.credentials);
        let same = Credentials { no_new_privs: own.no_new_privs, ..wanted.clone() } == *own;
        if !same {
            set_credentials(&mut batch, wanted, own.capabilities[1])?;
        }
        if thread.parent_death_signal != 0 {
            let arguments = [PR_SET_PDEATHSIG, thread.parent_death_signal as u64, 0, 0, 0];
            batch.must("set parent death signal", libc::SYS_prctl, &arguments);
        }
        batch.run()?;
        Ok(())
    }

    /// All filters of a thread but the `shared` oldest, which it has already.
    fn install_filters(&self, host: HostPid, thread: &Thread, shared: usize) -> GhostResult<()> {
        let seccomp = &thread.seccomp;
        if thread.credentials.no_new_privs {
            let arguments = [PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0];
            self.hands.batch(host).ask("set no_new_privs", libc::SYS_prctl, &arguments)?;
        }
        if seccomp.mode == 0 {
            return Ok(());
        }
        // Our own calls go on to pass; Body::resume_as switches the filters on.
        ptrace::suspend_seccomp(host, true)?;
        self.install(host, &seccomp.filters[shared..], 0)?;
        if seccomp.mode == 1 {
            let arguments = [PR_SET_SECCOMP, 1, 0, 0, 0];
            self.hands.batch(host).ask("set strict seccomp", libc::SYS_prctl, &arguments)?;
        }
        Ok(())
    }

    fn install(&self, host: HostPid, filters: &[SeccompFilter], more: u64) -> GhostResult<()> {
        for filter in filters {
            let limit = 4096 * 8;
            if filter.program.len() > limit || !filter.program.len().is_multiple_of(8) {
                return Err(GhostError::Image("length of a seccomp filter".into()));
            }
            // Slots from 2 on are not in use: room for the longest program.
            let stub = &self.hands.stub;
            stub.memory().write(Stub::scratch_offset(2), &filter.program);
            let mut batch = self.hands.batch(host);
            let count = filter.program.len() as u64 / 8;
            let program = batch.words(&[count, stub.scratch(2)]);
            let flags = filter.flags | more;
            batch.ask("install seccomp filter", libc::SYS_seccomp, &[1, flags, program])?;
        }
        Ok(())
    }

    /// Signals pending for one thread.
    pub(super) fn queue_thread_signals(
        &self,
        host: HostPid,
        live: &LiveProcess,
        thread: &Thread,
    ) -> GhostResult<()> {
        let mut batch = self.hands.batch(host);
        for signal in &thread.pending {
            let info = siginfo(&signal.siginfo)?;
            if is_from_timer(live, info) {
                continue;
            }
            batch.room(160, 1)?;
            let at = batch.data(info);
            let arguments = [self.pid.0 as u64, thread.tid.0 as u64, number_of(info), at];
            batch.must("queue signal", libc::SYS_rt_tgsigqueueinfo, &arguments);
        }
        batch.run()?;
        Ok(())
    }

    /// Registers the restartable sequences of `threads`, side by side. The kernel clears the
    /// critical section a thread was in; the capture has led it out of there.
    pub(super) fn register_rseq(&self, threads: &[Thread]) -> GhostResult<()> {
        let with_rseq: Vec<&Thread> = threads.iter().filter(|one| one.rseq[0] != 0).collect();
        for group in with_rseq.chunks(remote::SLOTS) {
            let mut batches = Vec::new();
            for (slot, thread) in group.iter().enumerate() {
                let [address, bytes, signature, _] = thread.rseq;
                let mut batch = self.hands.batch_in(slot, self.thread(thread.tid)?);
                let arguments = [address, bytes, 0, signature];
                batch.must("register rseq", libc::SYS_rseq, &arguments);
                batch.begin()?;
                batches.push(batch);
            }
            for mut batch in batches {
                batch.end()?;
            }
        }
        Ok(())
    }

    /// Registers the thread is to go on with. Where it slept in a timed call, the kernel's restart
    /// block is made by making that call again for the rest of the time and interrupting it.
    pub(super) fn final_registers(&self, host: HostPid, thread: &Thread) -> GhostResult<Registers> {
        let mut registers = thread.registers;
        if registers[reg::RAX] as i64 != RESTART_BLOCK || registers[reg::ORIG_RAX] as i64 == -1 {
            return Ok(registers);
        }
        let rest = match thread.restart {
            Some(restart) => self.rest_of_call(&registers, restart)?,
            None => None,
        };
        let result = match rest {
            Some((call, arguments)) => self.interrupted_call(host, call, arguments)?,
            // A call of which nothing more is known: its caller sees that a signal came.
            None => i64::from(-libc::EINTR),
        };
        if result != RESTART_BLOCK {
            registers[reg::RAX] = result as u64;
            registers[reg::ORIG_RAX] = u64::MAX;
        }
        Ok(registers)
    }

    /// Arguments of an interrupted call for the rest of its time; timeouts lie in slot 0.
    fn rest_of_call(
        &self,
        registers: &Registers,
        restart: Restart,
    ) -> GhostResult<Option<(i64, [u64; 6])>> {
        let Restart { blocked_ns: mut blocked, call } = restart;
        let order = [reg::RDI, reg::RSI, reg::RDX, reg::R10, reg::R8, reg::R9];
        let mut arguments = order.map(|index| registers[index]);
        // Where a sleep's time is told, and where the kernel writes what is left of it.
        let (at, left_at) = match call {
            libc::SYS_nanosleep => (0, arguments[1]),
            libc::SYS_clock_nanosleep => (2, arguments[3]),
            libc::SYS_futex if arguments[1] & 0x7f == libc::FUTEX_WAIT as u64 => (3, 0),
            // Its timeout is a point in time.
            libc::SYS_futex => return Ok(Some((call, arguments))),
            libc::SYS_poll => {
                // A negative timeout is none.
                if let Ok(left) = u64::try_from(arguments[2] as i32) {
                    arguments[2] = left.saturating_sub(blocked / 1_000_000);
                }
                return Ok(Some((call, arguments)));
            }
            _ => return Ok(None),
        };
        // Written at every interruption, over the time itself if the caller gave one place for both
        // (nanosleep(2)).
        let told_at = if left_at == 0 { arguments[at] } else { left_at };
        if left_at != 0 {
            blocked = 0;
        }
        let mut bytes = [0u8; 16];
        self.memory.read_exact(told_at, &mut bytes)?;
        let word = |from: usize| {
            let bytes: [u8; 8] = bytes[from..from + 8].try_into().unwrap_or_default();
            u64::from_ne_bytes(bytes)
        };
        const NS: u64 = 1_000_000_000;
        let total = word(0).saturating_mul(NS).saturating_add(word(8));
        let left = total.saturating_sub(blocked).max(1);
        let stub = &self.hands.stub;
        let offset = Stub::scratch_offset(0);
        stub.memory().write_u64(offset, left / NS);
        stub.memory().write_u64(offset + 8, left % NS);
        arguments[at] = stub.scratch(0);
        Ok(Some((call, arguments)))
    }

    /// Makes the call and interrupts it before it can sleep. Its result.
    fn interrupted_call(&self, host: HostPid, call: i64, arguments: [u64; 6]) -> GhostResult<i64> {
        let mut registers = *self.hands.frame();
        registers[reg::RIP] = self.hands.stub.syscall_instruction();
        registers[reg::RAX] = call as u64;
        registers[reg::ORIG_RAX] = u64::MAX;
        let order = [reg::RDI, reg::RSI, reg::RDX, reg::R10, reg::R8, reg::R9];
        for (index, argument) in order.into_iter().zip(arguments) {
            registers[index] = argument;
        }
        ptrace::set_registers(host, &registers)?;
        ptrace::cont_to_syscall(host, 0)?;
        match ptrace::wait(Whose::One(host), true)? {
            Waited::Stopped(_, Stop::Syscall) => {}
            other => return Err(unexpected(host, other).into()),
        }
        ptrace::interrupt(host)?;
        ptrace::cont(host, 0)?;
        await_interrupted(host)?;
        Ok(ptrace::registers(host)?[reg::RAX] as i64)
    }

    /// The last touch: filters on, registers and mask as the guest had them.
    pub(super) fn resume_as(
        &self,
        host: HostPid,
        thread: &Thread,
        registers: &Registers,
    ) -> GhostResult<()> {
        if !thread.extended.is_empty() {
            ptrace::set_extended_registers(host, &thread.extended)?;
        }
        ptrace::set_registers(host, registers)?;
        ptrace::set_signal_mask(host, thread.signal_mask)?;
        if thread.seccomp.mode != 0 {
            ptrace::suspend_seccomp(host, false)?;
        }
        schedule(host, &thread.scheduling)
    }

    /// Puts the process, whose stub is gone, into a job-control stop by `signal`. Its threads
    /// stand in that stop afterwards.
    pub(super) fn stop_as(&self, live: &LiveProcess, signal: i32) -> GhostResult<()> {
        let pid = nix::unistd::Pid::from_raw(self.host.0);
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGSTOP)
            .map_err(|errno| GhostError::io("stop ghost process")(errno.into()))?;
        ptrace::cont(self.host, 0)?;
        match ptrace::wait(Whose::One(self.host), true)? {
            Waited::Stopped(_, Stop::Signal(libc::SIGSTOP)) => {}
            other => return Err(unexpected(self.host, other).into()),
        }
        // Any stop signal may be delivered in its place; one that the guest handles may not.
        let action = live.signal_actions.get(signal as usize - 1);
        let plain = action.is_none_or(|action| action.handler == 0);
        ptrace::cont(self.host, if plain { signal } else { libc::SIGSTOP })?;
        for (index, (_, host)) in self.threads.iter().enumerate() {
            if index > 0 {
                ptrace::cont(*host, 0)?;
            }
            match ptrace::wait(Whose::One(*host), true)? {
                Waited::Stopped(_, Stop::Group(_)) => {}
                other => return Err(unexpected(*host, other).into()),
            }
        }
        Ok(())
    }

    /// The host's number of a thread.
    pub(super) fn thread(&self, tid: GuestPid) -> GhostResult<HostPid> {
        self.threads
            .iter()
            .find(|(number, _)| *number == tid)
            .map(|(_, host)| *host)
            .ok_or_else(|| GhostError::Image(format!("no ghost of thread {}", tid.0)))
    }
}

/// From outside: a thread with little of the processor would make our calls slowly.
fn schedule(host: HostPid, wanted: &Scheduling) -> GhostResult<()> {
    let Scheduling { policy, priority, nice, reset_on_fork, .. } = *wanted;
    if thread_info::scheduling(host)? != (policy, priority, nice, reset_on_fork) {
        spawn::set_scheduling(host, policy, priority, nice, reset_on_fork)?;
    }
    if wanted.affinity.is_empty() {
        return Ok(());
    }
    match spawn::set_affinity(host, &wanted.affinity) {
        // This host has none of those processors: then all it has.
        Err(error) if error.errno() == Some(libc::EINVAL) => Ok(()),
        other => Ok(other?),
    }
}

/// How many filters all of several threads have alike, the oldest first.
fn shared_filters(threads: &[Thread]) -> usize {
    let [first, others @ ..] = threads else { return 0 };
    let alike = |thread: &Thread| {
        let pairs = first.seccomp.filters.iter().zip(&thread.seccomp.filters);
        pairs.take_while(|(one, other)| one == other).count()
    };
    others.iter().map(alike).min().unwrap_or(0)
}

/// Credentials in the one order that works: identities while we may still change them, sets,
/// then what forbids further changes. `all` is the ghost's permitted set so far.
fn set_credentials(batch: &mut Batch<'_>, wanted: &Credentials, all: u64) -> GhostResult<()> {
    let securebits = |bits: u64| [PR_SET_SECUREBITS, bits, 0, 0, 0];
    let [inheritable, permitted, effective, bounding, ambient] = wanted.capabilities;
    batch.room(wanted.groups.len() * 4 + 64, 8)?;
    let fixup = securebits(SECBIT_NO_SETUID_FIXUP);
    batch.must("keep capabilities", libc::SYS_prctl, &fixup);
    let groups: Vec<u8> = wanted.groups.iter().flat_map(|group| group.to_ne_bytes()).collect();
    let at = batch.data(&groups);
    batch.must("set groups", libc::SYS_setgroups, &[wanted.groups.len() as u64, at]);
    let [real, effective_id, saved, files] = wanted.gids.map(u64::from);
    batch.must("set group ids", libc::SYS_setresgid, &[real, effective_id, saved]);
    batch.may(libc::SYS_setfsgid, &[files]);
    let [real, effective_id, saved, files] = wanted.uids.map(u64::from);
    batch.must("set user ids", libc::SYS_setresuid, &[real, effective_id, saved]);
    batch.may(libc::SYS_setfsuid, &[files]);
    for capability in 0..=LAST_CAPABILITY {
        if bounding & 1 << capability == 0 {
            batch.room(0, 1)?;
            batch.may(libc::SYS_prctl, &[PR_CAPBSET_DROP, capability, 0, 0, 0]);
        }
    }
    batch.room(256, 48)?;
    if ambient != 0 {
        set_capabilities(batch, inheritable, all, all);
        batch.must(
            "clear ambient set",
            libc::SYS_prctl,
            &[PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0],
        );
        for capability in (0..=LAST_CAPABILITY).filter(|bit| ambient & 1 << bit != 0) {
            let arguments = [PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, capability, 0, 0];
            batch.must("raise ambient capability", libc::SYS_prctl, &arguments);
        }
    }
    batch.must("set securebits", libc::SYS_prctl, &securebits(wanted.securebits.into()));
    set_capabilities(batch, inheritable, permitted, effective);
    Ok(())
}

fn set_capabilities(batch: &mut Batch<'_>, inheritable: u64, permitted: u64, effective: u64) {
    const VERSION_3: u64 = 0x2008_0522;
    let header = batch.words(&[VERSION_3]);
    let halves = |shift: u32| {
        [effective, permitted, inheritable].map(|set| ((set >> shift) as u32).to_ne_bytes())
    };
    let data: Vec<u8> = [halves(0), halves(32)].concat().concat();
    let data = batch.data(&data);
    batch.must("set capabilities", libc::SYS_capset, &[header, data]);
}
