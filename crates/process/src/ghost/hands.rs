//! Our hands inside a ghost process: batches of system calls through the stub.

use std::os::fd::{AsFd, BorrowedFd};

use hotspare_kernel::proc_maps::MapLine;
use hotspare_kernel::ptrace::{self, HostPid, Registers, Stop, Waited, Whose};
use hotspare_kernel::remote::{self, Call, Stub};
use hotspare_kernel::spawn::{CLONE_ARGS_BYTES, CloneArgs};
use hotspare_kernel::{KernelError, Result};

/// All signals but SIGTRAP, which the stub needs.
pub(super) const ALL_BUT_TRAP: u64 = !(1 << (libc::SIGTRAP - 1));

/// The stub of one process, and the registers its threads run it with.
#[derive(Debug)]
pub(super) struct Hands {
    pub(super) stub: Stub,
    frame: Registers,
}

impl Hands {
    /// Puts the stub into the process of stopped thread `tid`, away from `taken`.
    pub(super) fn reach(
        tid: HostPid,
        pidfd: BorrowedFd<'_>,
        taken: &[MapLine],
        instruction: u64,
    ) -> Result<Self> {
        ptrace::set_signal_mask(tid, ALL_BUT_TRAP)?;
        let frame = ptrace::registers(tid)?;
        let stub = Stub::inject(tid, pidfd, taken, instruction)?;
        Ok(Self { stub, frame })
    }

    /// An empty batch of calls for stopped thread `tid` in slot 0.
    pub(super) fn batch(&self, tid: HostPid) -> Batch<'_> {
        self.batch_in(0, tid)
    }

    /// The same in another slot, to run beside others.
    pub(super) fn batch_in(&self, slot: usize, tid: HostPid) -> Batch<'_> {
        let (calls, verbs, bytes) = Default::default();
        Batch { hands: self, slot, tid, calls, verbs, bytes }
    }

    /// Makes stopped thread `tid` clone a process or thread with this number; the child is seized
    /// and stands before its first instruction.
    pub(super) fn clone(&self, tid: HostPid, mut args: CloneArgs, number: i32) -> Result<HostPid> {
        let at = self.stub.scratch(0);
        args.set_tid = at + CLONE_ARGS_BYTES as u64;
        args.set_tid_count = 1;
        let mut bytes = args.to_bytes();
        bytes.extend(number.to_ne_bytes());
        self.stub.memory().write(Stub::scratch_offset(0), &bytes);
        let mut calls = [Call::new(libc::SYS_clone3, &[at, CLONE_ARGS_BYTES as u64])];
        self.stub.start(tid, 0, &self.frame, &calls)?;
        let mut born = None;
        loop {
            match ptrace::wait(Whose::One(tid), true)? {
                Waited::Stopped(_, Stop::Born { child, .. }) => {
                    born = Some(child);
                    ptrace::cont(tid, 0)?;
                }
                Waited::Stopped(_, Stop::Signal(libc::SIGTRAP)) => break,
                Waited::Stopped(_, Stop::Interrupted) => ptrace::cont(tid, 0)?,
                other => return Err(unexpected(tid, other)),
            }
        }
        self.stub.results(0, &mut calls);
        calls[0].value("clone")?;
        let child = born.ok_or_else(|| KernelError::Unexpected("clone without a child".into()))?;
        await_interrupted(child)?;
        ptrace::set_signal_mask(child, ALL_BUT_TRAP)?;
        Ok(child)
    }

    /// Makes stopped thread `tid`, alone in its process, execute the idle program at descriptor
    /// `idle`. Uses slot 1, so that a child that shares memory with its parent can do it.
    pub(super) fn execute_idle(&self, tid: HostPid, idle: i32) -> Result<()> {
        let at = self.stub.scratch(1);
        let words = [0, at, 0];
        let bytes: Vec<u8> = words.iter().flat_map(|word: &u64| word.to_ne_bytes()).collect();
        self.stub.memory().write(Stub::scratch_offset(1), &bytes);
        let flags = libc::AT_EMPTY_PATH as u64;
        let arguments = [idle as u64, at, at + 8, at + 16, flags];
        let mut calls = [Call::new(libc::SYS_execveat, &arguments)];
        self.stub.start(tid, 1, &self.frame, &calls)?;
        loop {
            match ptrace::wait(Whose::One(tid), true)? {
                Waited::Stopped(_, Stop::Exec { .. }) => return settle_after_exec(tid),
                Waited::Stopped(_, Stop::Interrupted) => ptrace::cont(tid, 0)?,
                Waited::Stopped(_, Stop::Signal(libc::SIGTRAP)) => {
                    self.stub.results(1, &mut calls);
                    calls[0].value("execute the idle program")?;
                }
                other => return Err(unexpected(tid, other)),
            }
        }
    }

    /// Makes stopped thread `tid` end by `number` (`SYS_exit` or `SYS_exit_group`). The kernel
    /// must not write to the guest's memory then, as it did in the guest's own end.
    pub(super) fn end(&self, tid: HostPid, number: i64, status: i32) -> Result<()> {
        let calls = [
            Call::new(libc::SYS_set_tid_address, &[0]),
            Call::new(libc::SYS_set_robust_list, &[0, 24]),
            Call::new(number, &[status as u64]),
        ];
        self.stub.start(tid, 0, &self.frame, &calls)?;
        await_end(tid)
    }

    /// Unmaps the stub as the last act of thread `tid`, which then stands at a stop from which
    /// it can be resumed with any registers.
    pub(super) fn withdraw(&self, tid: HostPid, before: &mut [Call]) -> Result<()> {
        let detour = remote::Detour::begin(tid)?;
        let instruction = self.stub.syscall_instruction();
        for call in before {
            remote::single(&detour, instruction, call)?;
        }
        let (start, end) = self.stub.range();
        let mut unmap = Call::new(libc::SYS_munmap, &[start, end - start]);
        remote::single(&detour, instruction, &mut unmap)?;
        unmap.value("unmap stub")?;
        // A stop for a system call's exit would not restart the interrupted call that the
        // registers will speak of; this stop does.
        ptrace::interrupt(tid)?;
        ptrace::cont(tid, 0)?;
        await_interrupted(tid)
    }

    /// The registers calls are made with.
    pub(super) fn frame(&self) -> &Registers {
        &self.frame
    }
}

/// Waits until `tid` stands in an interrupt stop.
pub(super) fn await_interrupted(tid: HostPid) -> Result<()> {
    match ptrace::wait(Whose::One(tid), true)? {
        Waited::Stopped(_, Stop::Interrupted) => Ok(()),
        other => Err(unexpected(tid, other)),
    }
}

/// From the stop in execve(2) to one before the new program's first instruction.
pub(super) fn settle_after_exec(tid: HostPid) -> Result<()> {
    ptrace::interrupt(tid)?;
    ptrace::cont(tid, 0)?;
    await_interrupted(tid)
}

/// Waits until a thread that was told to end has.
pub(super) fn await_end(tid: HostPid) -> Result<()> {
    loop {
        match ptrace::wait(Whose::One(tid), true)? {
            Waited::Ended(..) | Waited::NoChildren => return Ok(()),
            Waited::Stopped(..) => {
                if let Err(error) = ptrace::cont(tid, 0)
                    && !error.is_died()
                {
                    return Err(error);
                }
            }
            Waited::Nothing => {}
        }
    }
}

pub(super) fn unexpected(tid: HostPid, waited: Waited) -> KernelError {
    match waited {
        Waited::Ended(..) | Waited::NoChildren => KernelError::Died(tid),
        other => KernelError::Unexpected(format!("thread {tid}: {other:?}")),
    }
}

/// Calls collected for one thread, run in as few stops as their number allows.
#[derive(Debug)]
pub(super) struct Batch<'a> {
    hands: &'a Hands,
    slot: usize,
    tid: HostPid,
    calls: Vec<Call>,
    verbs: Vec<&'static str>,
    bytes: Vec<u8>,
}

impl Batch<'_> {
    /// Makes room for `calls` calls with `bytes` bytes of data that must run together.
    pub(super) fn room(&mut self, bytes: usize, calls: usize) -> Result<()> {
        let full = self.calls.len() + calls > remote::CALLS_MAX
            || self.bytes.len() + bytes + 16 > remote::SCRATCH_BYTES;
        if full { self.run().map(drop) } else { Ok(()) }
    }

    /// Lays `bytes` into the process's memory; their address, aligned to 8. [`Batch::room`] first.
    pub(super) fn data(&mut self, bytes: &[u8]) -> u64 {
        let offset = self.bytes.len().next_multiple_of(8);
        self.bytes.resize(offset, 0);
        self.bytes.extend_from_slice(bytes);
        self.hands.stub.scratch(self.slot) + offset as u64
    }

    /// Words as data.
    pub(super) fn words(&mut self, words: &[u64]) -> u64 {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        self.data(&bytes)
    }

    /// A path or name as data, with its final zero.
    pub(super) fn text(&mut self, text: &[u8]) -> u64 {
        let mut bytes = text.to_vec();
        bytes.push(0);
        self.data(&bytes)
    }

    /// Adds a call that must succeed. [`Batch::room`] first where it uses data.
    pub(super) fn must(&mut self, verb: &'static str, number: i64, arguments: &[u64]) {
        self.calls.push(Call::new(number, arguments).required());
        self.verbs.push(verb);
    }

    /// Adds a call that must succeed, whose only argument is the result of the call before it.
    pub(super) fn then(&mut self, verb: &'static str, number: i64) {
        self.calls.push(Call::new(number, &[]).chained().required());
        self.verbs.push(verb);
    }

    /// Adds a call whose failure does not matter.
    pub(super) fn may(&mut self, number: i64, arguments: &[u64]) {
        self.calls.push(Call::new(number, arguments));
        self.verbs.push("");
    }

    /// Runs what was collected. The results, in order; the first failure of a call that had to
    /// succeed is the error.
    pub(super) fn run(&mut self) -> Result<Vec<i64>> {
        if self.calls.is_empty() {
            self.bytes.clear();
            return Ok(Vec::new());
        }
        self.begin()?;
        self.end()
    }

    /// Starts the calls; [`Batch::end`] must follow before anything else happens to the thread.
    pub(super) fn begin(&mut self) -> Result<()> {
        let stub = &self.hands.stub;
        stub.memory().write(Stub::scratch_offset(self.slot), &self.bytes);
        stub.start(self.tid, self.slot, &self.hands.frame, &self.calls)
    }

    /// Waits for the calls of [`Batch::begin`].
    pub(super) fn end(&mut self) -> Result<Vec<i64>> {
        self.hands.stub.finish(self.tid, self.slot, &mut self.calls)?;
        self.bytes.clear();
        let verbs = std::mem::take(&mut self.verbs);
        let calls = std::mem::take(&mut self.calls);
        for (call, verb) in calls.iter().zip(verbs) {
            if !verb.is_empty() {
                call.value(verb)?;
            }
        }
        Ok(calls.iter().map(|call| call.result).collect())
    }

    /// Runs what was collected, then one more call; its value.
    pub(super) fn ask(
        &mut self,
        verb: &'static str,
        number: i64,
        arguments: &[u64],
    ) -> Result<u64> {
        self.must(verb, number, arguments);
        let results = self.run()?;
        Ok(results.last().copied().unwrap_or_default() as u64)
    }
}

/// The mappings of `pid`, as the stub looks for room in them.
pub(super) fn maps_of(pid: HostPid) -> Result<Vec<MapLine>> {
    let mut lines = Vec::new();
    hotspare_kernel::proc_maps::read(pid, &mut Vec::new(), &mut lines)?;
    Ok(lines)
}

/// Keeps `pidfd` borrowed in one place.
pub(super) fn borrow(pidfd: &impl AsFd) -> BorrowedFd<'_> {
    pidfd.as_fd()
}
