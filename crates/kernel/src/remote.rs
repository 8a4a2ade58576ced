//! System calls inside a traced process.
//!
//! # The stub
//!
//! A stopped thread can be made to run any system call: point its registers at a `syscall`
//! instruction and let it go. One stop a call would cost two context switches each, so a small
//! piece of code, the *stub*, is mapped into the process once. It runs a list of calls from memory
//! that we share with it and ends with `int3`, which stops the thread again: two context switches
//! for any number of calls. The first few calls, which map the stub itself, go through the
//! `syscall` instruction of the vDSO.
//!
//! While a thread runs the stub, all signals but SIGTRAP are blocked, so nothing of the guest's is
//! delivered in between. SIGTRAP must stay unblocked: the kernel resets the action of a blocked
//! signal that it has to force.
//!
//! The mapping is not inherited by forked children (`MADV_DONTFORK`) and is not guest state.

use std::os::fd::{AsFd, BorrowedFd};

use crate::error::{KernelError, Result};
use crate::pidfd;
use crate::proc_maps::MapLine;
use crate::ptrace::{self, HostPid, Registers, Stop, reg};
use crate::shared::SharedMapping;

/// One system call to run in the guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Call {
    /// Number.
    pub number: i64,
    /// Arguments.
    pub arguments: [u64; 6],
    /// Do not run the calls behind this one if it fails.
    pub required: bool,
    /// The result of the call before this one takes the place of the first argument.
    pub chained: bool,
    /// What it returned: negative error numbers in the kernel's way; [`NOT_RUN`] if it did not run.
    pub result: i64,
}

/// Result of a call that did not run because a required one before it failed.
pub const NOT_RUN: i64 = i64::MIN;

impl Call {
    /// Call `number` with up to six `arguments`.
    pub fn new(number: i64, arguments: &[u64]) -> Self {
        let mut call = Self { number, result: NOT_RUN, ..Self::default() };
        call.arguments[..arguments.len()].copy_from_slice(arguments);
        call
    }

    /// The same, and the calls behind it do not run if it fails.
    pub fn required(mut self) -> Self {
        self.required = true;
        self
    }

    /// The same, with the result of the call before as first argument.
    pub fn chained(mut self) -> Self {
        self.chained = true;
        self
    }

    /// The returned value, or the error for `verb`.
    pub fn value(&self, verb: &'static str) -> Result<u64> {
        match self.result {
            NOT_RUN => Err(KernelError::Unexpected(format!("{verb}: not run"))),
            error @ -4095..=-1 => Err(KernelError::from_errno(verb, -error as i32)),
            value => Ok(value as u64),
        }
    }
}

// A call in memory: number with flags in the upper half, six arguments, result.
const CALL_BYTES: usize = 64;
const FLAG_REQUIRED: u64 = 1 << 32;
const FLAG_CHAINED: u64 = 1 << 33;

core::arch::global_asm!(
    ".pushsection .rodata.hotspare_stub, \"a\"",
    ".global hotspare_stub_start",
    ".global hotspare_stub_end",
    "hotspare_stub_start:",
    // r12: next call, r13: calls left, r14: result of the call before.
    "2: test r13, r13",
    "jz 9f",
    "mov rax, [r12]",
    "mov rdi, [r12 + 8]",
    "bt rax, 33",
    "jnc 3f",
    "mov rdi, r14",
    "3: mov eax, eax",
    "mov rsi, [r12 + 16]",
    "mov rdx, [r12 + 24]",
    "mov r10, [r12 + 32]",
    "mov r8, [r12 + 40]",
    "mov r9, [r12 + 48]",
    "syscall",
    "mov [r12 + 56], rax",
    "mov r14, rax",
    "cmp rax, -4095",
    "jb 4f",
    "bt qword ptr [r12], 32",
    "jc 9f",
    "4: add r12, 64",
    "dec r13",
    "jmp 2b",
    "9: int3",
    "jmp 9b",
    "hotspare_stub_end:",
    ".popsection",
);

unsafe extern "C" {
    static hotspare_stub_start: u8;
    static hotspare_stub_end: u8;
}

/// The stub's machine code; position independent.
pub fn code() -> &'static [u8] {
    let start = &raw const hotspare_stub_start;
    let end = &raw const hotspare_stub_end;
    // SAFETY: both labels are in one section, start before end, read-only for ever.
    unsafe { std::slice::from_raw_parts(start, end as usize - start as usize) }
}

const PAGE: usize = 4096;
/// Scratch bytes of a slot.
pub const SCRATCH_BYTES: usize = 16 * 1024;
/// Most calls in one batch.
pub const CALLS_MAX: usize = 256;
const SLOT_BYTES: usize = CALLS_MAX * CALL_BYTES + SCRATCH_BYTES;
/// Threads that can run the stub at the same time in one process.
pub const SLOTS: usize = 32;
/// Bytes of the stub's memory: one page of code, then the slots.
const MEMORY_BYTES: usize = PAGE + SLOTS * SLOT_BYTES;
/// Bytes of the stub in the guest: its memory, and the probe page ([`Stub::probe_page`]).
pub const STUB_BYTES: usize = MEMORY_BYTES + PAGE;

/// The stub in one process, and our view of its memory.
#[derive(Debug)]
pub struct Stub {
    base: u64,
    memory: SharedMapping,
}

/// A thread that was taken off its own road to run calls; [`Detour::end`] puts it back.
///
/// Dropping it without `end` leaves the thread where the stub left it: the owner must then treat
/// the thread as lost.
#[derive(Debug)]
#[must_use = "the thread must be put back on its road"]
pub struct Detour {
    tid: HostPid,
    registers: Registers,
    mask: u64,
}

const ALL_BUT_TRAP: u64 = !(1 << (libc::SIGTRAP - 1));

impl Detour {
    /// Saves the registers and signal mask of stopped thread `tid` and blocks signals.
    pub fn begin(tid: HostPid) -> Result<Self> {
        let registers = ptrace::registers(tid)?;
        let mask = ptrace::signal_mask(tid)?;
        ptrace::set_signal_mask(tid, ALL_BUT_TRAP)?;
        Ok(Self { tid, registers, mask })
    }

    /// Registers of the thread as it was stopped.
    pub fn registers(&self) -> &Registers {
        &self.registers
    }

    /// Signal mask of the thread as it was stopped.
    pub fn mask(&self) -> u64 {
        self.mask
    }

    /// Puts the thread back.
    pub fn end(self) -> Result<()> {
        let registers = self.registers;
        self.end_with(&registers)
    }

    /// Puts the thread back with other registers.
    pub fn end_with(self, registers: &Registers) -> Result<()> {
        ptrace::set_registers(self.tid, registers)?;
        ptrace::set_signal_mask(self.tid, self.mask)
    }
}

/// Runs one system call at `instruction`, which must point at `syscall` (`0f 05`), in a stopped
/// thread on a [`Detour`]. Costs two stops; does not touch SIGTRAP.
pub fn single(detour: &Detour, instruction: u64, call: &mut Call) -> Result<()> {
    let mut registers = detour.registers;
    registers[reg::RIP] = instruction;
    registers[reg::ORIG_RAX] = u64::MAX;
    registers[reg::RAX] = call.number as u64;
    let order = [reg::RDI, reg::RSI, reg::RDX, reg::R10, reg::R8, reg::R9];
    for (register, argument) in order.into_iter().zip(call.arguments) {
        registers[register] = argument;
    }
    ptrace::set_registers(detour.tid, &registers)?;
    for _ in 0..2 {
        ptrace::cont_to_syscall(detour.tid, 0)?;
        await_stop(detour.tid, Stop::Syscall, ptrace::cont_to_syscall)?;
    }
    call.result = ptrace::registers(detour.tid)?[reg::RAX] as i64;
    Ok(())
}

/// Waits until `tid` stops as wanted, letting go on what may come in between.
fn await_stop(tid: HostPid, wanted: Stop, resume: fn(HostPid, i32) -> Result<()>) -> Result<()> {
    let mut faulted = false;
    loop {
        match ptrace::await_stop(tid)? {
            stop if stop == wanted => return Ok(()),
            // An interrupt that was asked for earlier, or a stop signal, which cannot be blocked:
            // the thread is about to be resumed by its owner, who will see the signal again.
            Stop::Interrupted | Stop::Group(_) => resume(tid, 0)?,
            // The thread's own, from before; a fault of the stub would come a second time.
            Stop::Signal(_) if !faulted && ptrace::is_fault(&ptrace::signal_info(tid)?) => {
                faulted = true;
                resume(tid, 0)?;
            }
            Stop::Signal(signal) if signal != libc::SIGTRAP => {
                return Err(KernelError::Unexpected(format!(
                    "signal {signal} while thread {tid} ran our calls"
                )));
            }
            stop => {
                return Err(KernelError::Unexpected(format!("thread {tid} stopped: {stop:?}")));
            }
        }
    }
}

/// Finds a `syscall` instruction in the vDSO of a process.
pub fn vdso_syscall(pid: HostPid, maps: &[MapLine]) -> Result<u64> {
    let vdso = maps
        .iter()
        .find(|map| map.name == "[vdso]")
        .ok_or_else(|| KernelError::Unexpected(format!("process {pid} has no vDSO")))?;
    let mut bytes = vec![0u8; (vdso.end - vdso.start) as usize];
    crate::memory::read(pid, &[(vdso.start, bytes.len())], &mut bytes)?;
    let at = bytes.windows(2).position(|pair| pair == [0x0f, 0x05]);
    let at = at.ok_or_else(|| KernelError::Unexpected("no syscall in the vDSO".into()))?;
    Ok(vdso.start + at as u64)
}

/// A stretch of `bytes` free in `maps` at a low address that programs rarely use.
pub fn free_address(maps: &[MapLine], bytes: u64) -> Result<u64> {
    let mut at = 0x7000_0000u64;
    for map in maps {
        if at + bytes <= map.start {
            break;
        }
        at = at.max(map.end);
    }
    (at + bytes < 0x7000_0000_0000)
        .then_some(at)
        .ok_or_else(|| KernelError::Unexpected("no free address for the stub".into()))
}

impl Stub {
    /// Maps the stub into the process of stopped thread `tid`.
    ///
    /// `maps` are the process's mappings, `instruction` a `syscall` in it. On failure the process
    /// has at most a closed descriptor number and a mapping more than before.
    pub fn inject(
        tid: HostPid,
        pidfd: BorrowedFd<'_>,
        maps: &[MapLine],
        instruction: u64,
    ) -> Result<Self> {
        let base = free_address(maps, STUB_BYTES as u64)?;
        let vdso = instruction & !(PAGE as u64 - 1);
        let detour = Detour::begin(tid)?;
        let stub = Self::inject_on(&detour, pidfd, base, vdso_name(maps, vdso), instruction);
        detour.end()?;
        stub
    }

    fn inject_on(
        detour: &Detour,
        pidfd: BorrowedFd<'_>,
        base: u64,
        name: u64,
        instruction: u64,
    ) -> Result<Self> {
        let run = |number, arguments: &[u64], verb| {
            let mut call = Call::new(number, arguments);
            single(detour, instruction, &mut call)?;
            call.value(verb)
        };
        let flags = libc::MFD_CLOEXEC.into();
        let fd = run(libc::SYS_memfd_create, &[name, flags], "create stub memory")?;
        let mapped = (|| {
            let memory = pidfd::get_fd(pidfd, fd as i32)?;
            // SAFETY: no pointer is passed.
            let sized = unsafe {
                libc::ftruncate(std::os::fd::AsRawFd::as_raw_fd(&memory), MEMORY_BYTES as i64)
            };
            crate::error::check("size stub memory", sized.into())?;
            let ours = SharedMapping::new(memory.as_fd(), MEMORY_BYTES)?;
            ours.write(0, code());
            let all = (libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC) as u64;
            let fixed = (libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE) as u64;
            let bytes = MEMORY_BYTES as u64;
            run(libc::SYS_mmap, &[base, bytes, all, fixed, fd, 0], "map stub")?;
            let empty = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
            let fixed = empty | libc::MAP_FIXED_NOREPLACE as u64;
            let probe = [base + bytes, PAGE as u64, 0, fixed, u64::MAX, 0];
            run(libc::SYS_mmap, &probe, "map the stub's probe page")?;
            let (bytes, dont_fork) = (STUB_BYTES as u64, libc::MADV_DONTFORK as u64);
            run(libc::SYS_munlock, &[base, bytes], "unlock stub")?;
            run(libc::SYS_madvise, &[base, bytes, dont_fork], "keep stub from children")?;
            Ok(ours)
        })();
        run(libc::SYS_close, &[fd], "close stub memory")?;
        Ok(Self { base, memory: mapped? })
    }

    /// Where the stub lies in the guest: start and end.
    pub fn range(&self) -> (u64, u64) {
        (self.base, self.base + STUB_BYTES as u64)
    }

    /// The stub's last page, which has no content: mapped anew, it has what the process wants of
    /// its future mappings.
    pub fn probe_page(&self) -> u64 {
        self.base + MEMORY_BYTES as u64
    }

    /// Address in the guest of slot `slot`'s scratch bytes.
    pub fn scratch(&self, slot: usize) -> u64 {
        self.base + Self::scratch_offset(slot) as u64
    }

    /// Our view of the memory; add [`Stub::scratch_offset`] for a slot's scratch bytes.
    pub fn memory(&self) -> &SharedMapping {
        &self.memory
    }

    /// Offset in [`Stub::memory`] of slot `slot`'s scratch bytes.
    pub fn scratch_offset(slot: usize) -> usize {
        assert!(slot < SLOTS, "stub slot {slot}");
        PAGE + slot * SLOT_BYTES + CALLS_MAX * CALL_BYTES
    }

    /// Address of a `syscall` instruction in the stub.
    pub fn syscall_instruction(&self) -> u64 {
        let at = code().windows(2).position(|pair| pair == [0x0f, 0x05]);
        self.base + at.expect("the stub makes system calls") as u64
    }

    /// Starts `calls` in a stopped thread, whose registers become `frame` except those the stub
    /// uses. [`Stub::finish`] waits for them. Different threads may run in different slots.
    pub fn start(
        &self,
        tid: HostPid,
        slot: usize,
        frame: &Registers,
        calls: &[Call],
    ) -> Result<()> {
        assert!(calls.len() <= CALLS_MAX, "{} calls in a batch", calls.len());
        let offset = Self::scratch_offset(slot) - CALLS_MAX * CALL_BYTES;
        for (index, call) in calls.iter().enumerate() {
            let mut number = call.number as u64;
            number |= if call.required { FLAG_REQUIRED } else { 0 };
            number |= if call.chained { FLAG_CHAINED } else { 0 };
            let mut words = [0u64; 8];
            words[0] = number;
            words[1..7].copy_from_slice(&call.arguments);
            words[7] = NOT_RUN as u64;
            for (word, value) in words.into_iter().enumerate() {
                self.memory.write_u64(offset + index * CALL_BYTES + word * 8, value);
            }
        }
        let mut registers = *frame;
        registers[reg::RIP] = self.base;
        registers[reg::ORIG_RAX] = u64::MAX;
        registers[reg::RAX] = 0;
        registers[reg::R12] = self.base + offset as u64;
        registers[reg::R13] = calls.len() as u64;
        ptrace::set_registers(tid, &registers)?;
        ptrace::cont(tid, 0)
    }

    /// Waits until the calls of [`Stub::start`] have run and takes their results.
    pub fn finish(&self, tid: HostPid, slot: usize, calls: &mut [Call]) -> Result<()> {
        await_stop(tid, Stop::Signal(libc::SIGTRAP), ptrace::cont)?;
        self.results(slot, calls);
        Ok(())
    }

    /// Takes the results of calls whose thread the caller itself has seen stop at the stub's end.
    pub fn results(&self, slot: usize, calls: &mut [Call]) {
        let offset = Self::scratch_offset(slot) - CALLS_MAX * CALL_BYTES;
        for (index, call) in calls.iter_mut().enumerate() {
            call.result = self.memory.read_u64(offset + index * CALL_BYTES + 56) as i64;
        }
    }

    /// Runs `calls` in a stopped thread of the guest and puts it back where it was.
    pub fn run(&self, tid: HostPid, slot: usize, calls: &mut [Call]) -> Result<()> {
        let detour = Detour::begin(tid)?;
        let done = self
            .start(tid, slot, detour.registers(), calls)
            .and_then(|()| self.finish(tid, slot, calls));
        detour.end()?;
        done
    }
}

/// An address of an empty string in the vDSO: the padding of its ELF identification.
fn vdso_name(maps: &[MapLine], near: u64) -> u64 {
    maps.iter().find(|map| map.name == "[vdso]").map_or(near, |map| map.start) + 9
}
