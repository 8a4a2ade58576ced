//! Small BPF programs, written instruction by instruction (Documentation/bpf/standardization/
//! instruction-set.rst), that read kernel memory and change nothing.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::error::{Result, check};

const BPF_MAP_CREATE: libc::c_int = 0;
const BPF_PROG_LOAD: libc::c_int = 5;
const BPF_PROG_TEST_RUN: libc::c_int = 10;
const BPF_LINK_CREATE: libc::c_int = 28;
const BPF_ITER_CREATE: libc::c_int = 33;
const BPF_PROG_TYPE_TRACING: u32 = 26;
const BPF_PROG_TYPE_SYSCALL: u32 = 31;
const BPF_TRACE_ITER: u32 = 28;
const BPF_F_SLEEPABLE: u32 = 1 << 4;
const BPF_MAP_TYPE_ARRAY: u32 = 2;
const BPF_F_MMAPABLE: u32 = 1 << 10;
/// `BPF_PSEUDO_MAP_VALUE`: the address of the first value of a map.
const MAP_VALUE: u8 = 2;
/// `BPF_FUNC_probe_read_kernel` (linux/bpf.h): copies kernel memory, zeroes if it is not there.
pub(crate) const PROBE_READ_KERNEL: i32 = 113;
/// `BPF_FUNC_seq_write`: adds to what a reader of the iterator gets.
pub(crate) const SEQ_WRITE: i32 = 127;
/// The helpers above are for programs under the GPL; these few instructions may be used under it.
const LICENSE: &[u8] = b"Dual BSD/GPL\0";

/// `struct bpf_insn`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Instruction {
    code: u8,
    registers: u8,
    offset: i16,
    value: i32,
}

const fn instruction(code: u8, to: u8, from: u8, offset: i16, value: i32) -> Instruction {
    Instruction { code, registers: to | from << 4, offset, value }
}

pub(crate) const fn copy(to: u8, from: u8) -> Instruction {
    instruction(0xbf, to, from, 0, 0)
}

pub(crate) const fn set(to: u8, value: i32) -> Instruction {
    instruction(0xb7, to, 0, 0, value)
}

pub(crate) const fn add(to: u8, value: i32) -> Instruction {
    instruction(0x07, to, 0, 0, value)
}

pub(crate) const fn and(to: u8, value: i32) -> Instruction {
    instruction(0x57, to, 0, 0, value)
}

pub(crate) const fn shift_left(to: u8, bits: i32) -> Instruction {
    instruction(0x67, to, 0, 0, bits)
}

pub(crate) const fn shift_right(to: u8, bits: i32) -> Instruction {
    instruction(0x77, to, 0, 0, bits)
}

pub(crate) const fn shift_right_register(to: u8, by: u8) -> Instruction {
    instruction(0x7f, to, by, 0, 0)
}

pub(crate) const fn add_register(to: u8, from: u8) -> Instruction {
    instruction(0x0f, to, from, 0, 0)
}

pub(crate) const fn load(to: u8, from: u8, offset: i16) -> Instruction {
    instruction(0x79, to, from, offset, 0)
}

pub(crate) const fn load_word(to: u8, from: u8, offset: i16) -> Instruction {
    instruction(0x61, to, from, offset, 0)
}

pub(crate) const fn load_byte(to: u8, from: u8, offset: i16) -> Instruction {
    instruction(0x71, to, from, offset, 0)
}

pub(crate) const fn store(to: u8, offset: i16, from: u8) -> Instruction {
    instruction(0x7b, to, from, offset, 0)
}

pub(crate) const fn store_byte(to: u8, offset: i16, from: u8) -> Instruction {
    instruction(0x73, to, from, offset, 0)
}

/// Skips `count` instructions if the register is zero.
pub(crate) const fn skip_if_zero(register: u8, count: i16) -> Instruction {
    instruction(0x15, register, 0, count, 0)
}

/// Skips `count` instructions if the register, unsigned, is at most `value`.
pub(crate) const fn skip_if_at_most(register: u8, value: i32, count: i16) -> Instruction {
    instruction(0xb5, register, 0, count, value)
}

/// Skips `count` instructions.
pub(crate) const fn skip(count: i16) -> Instruction {
    instruction(0x05, 0, 0, count, 0)
}

/// Skips `count` instructions unless the register is `value`.
pub(crate) const fn skip_unless(register: u8, value: i32, count: i16) -> Instruction {
    instruction(0x55, register, 0, count, value)
}

/// Skips `count` instructions if two registers differ.
pub(crate) const fn skip_unless_equal(one: u8, other: u8, count: i16) -> Instruction {
    instruction(0x5d, one, other, count, 0)
}

pub(crate) const fn helper(number: i32) -> Instruction {
    instruction(0x85, 0, 0, 0, number)
}

/// A function of the kernel, by its number in the kernel's types.
pub(crate) const fn function(number: u32) -> Instruction {
    instruction(0x85, 0, 2, 0, number as i32)
}

pub(crate) const EXIT: Instruction = instruction(0x95, 0, 0, 0, 0);

/// The address of a place in a [`make_buffer`].
pub(crate) fn value_of(to: u8, buffer: &OwnedFd, at: usize) -> [Instruction; 2] {
    [instruction(0x18, to, MAP_VALUE, 0, buffer.as_raw_fd()), instruction(0, 0, 0, 0, at as i32)]
}

/// The beginning of `union bpf_attr` for `BPF_PROG_LOAD`.
#[repr(C)]
#[derive(Default)]
struct LoadAttributes {
    kind: u32,
    count: u32,
    instructions: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
    version: u32,
    flags: u32,
    name: [u8; 16],
    interface: u32,
    attached_as: u32,
    debug: [u64; 4],
    lines: u32,
    attached_to: u32,
}

/// The same for `BPF_PROG_TEST_RUN`.
#[repr(C)]
#[derive(Default)]
struct RunAttributes {
    program: u32,
    result: u32,
    sizes: [u32; 2],
    data: [u64; 2],
    repeat: u32,
    duration: u32,
    context_size: u32,
    context_size_out: u32,
    context: u64,
    context_out: u64,
    flags: [u32; 4],
}

/// The beginning of the attributes of `BPF_MAP_CREATE`.
#[repr(C)]
#[derive(Default)]
struct MapAttributes {
    kind: u32,
    key_bytes: u32,
    value_bytes: u32,
    entries: u32,
    flags: u32,
    rest: [u32; 11],
}

/// The beginning of the attributes of `BPF_LINK_CREATE`.
#[repr(C)]
#[derive(Default)]
struct LinkAttributes {
    program: u32,
    target: u32,
    attached_as: u32,
    flags: u32,
    about: u64,
    about_bytes: u32,
    rest: u32,
}

/// `union bpf_iter_link_info` of an iterator over tasks or their files.
#[repr(C)]
#[derive(Default)]
struct TaskInfo {
    thread: u32,
    process: u32,
    pidfd: u32,
    rest: u32,
}

fn bpf<T>(command: libc::c_int, attributes: &mut T) -> libc::c_long {
    let (address, bytes) = (std::ptr::from_mut(attributes), size_of::<T>());
    // SAFETY: the callers pass a structure of their own, of which all that it points at outlives
    // the call.
    unsafe { libc::syscall(libc::SYS_bpf, command, address, bytes) }
}

fn made(verb: &'static str, fd: libc::c_long) -> Result<OwnedFd> {
    let fd = check(verb, fd)?;
    // SAFETY: the kernel just gave us this descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Memory that programs and, if they map it, we share.
pub(crate) fn make_buffer(bytes: usize) -> Result<OwnedFd> {
    let mut attributes = MapAttributes {
        kind: BPF_MAP_TYPE_ARRAY,
        key_bytes: 4,
        value_bytes: bytes as u32,
        entries: 1,
        flags: BPF_F_MMAPABLE,
        ..MapAttributes::default()
    };
    made("make room for a BPF program", bpf(BPF_MAP_CREATE, &mut attributes))
}

/// How a program comes to run.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    /// We call it ([`run`]).
    Called,
    /// For each thing that an iterator meets; the number of its function in the kernel's types.
    Iterator(u32),
}

impl Kind {
    /// Loads a program of this kind.
    pub(crate) fn load(self, program: &[Instruction]) -> Result<OwnedFd> {
        let mut attributes = LoadAttributes {
            count: program.len() as u32,
            instructions: program.as_ptr() as u64,
            license: LICENSE.as_ptr() as u64,
            ..LoadAttributes::default()
        };
        match self {
            Self::Called => {
                attributes.kind = BPF_PROG_TYPE_SYSCALL;
                attributes.flags = BPF_F_SLEEPABLE;
            }
            Self::Iterator(of) => {
                attributes.kind = BPF_PROG_TYPE_TRACING;
                attributes.attached_as = BPF_TRACE_ITER;
                attributes.attached_to = of;
            }
        }
        made("load a BPF program", bpf(BPF_PROG_LOAD, &mut attributes))
    }
}

/// Runs a program that is called, with a context that it may change.
pub(crate) fn run<T>(program: &OwnedFd, context: &mut T) -> Result<()> {
    let mut attributes = RunAttributes {
        program: program.as_raw_fd() as u32,
        context_size: size_of::<T>() as u32,
        context: std::ptr::from_mut(context) as u64,
        ..RunAttributes::default()
    };
    check("run a BPF program", bpf(BPF_PROG_TEST_RUN, &mut attributes)).map(drop)
}

/// Points an iterator at the threads of one process, by a descriptor of it.
pub(crate) fn iterate_threads(program: &OwnedFd, pidfd: &impl AsRawFd) -> Result<OwnedFd> {
    let about = TaskInfo { pidfd: pidfd.as_raw_fd() as u32, ..TaskInfo::default() };
    let mut attributes = LinkAttributes {
        program: program.as_raw_fd() as u32,
        attached_as: BPF_TRACE_ITER,
        about: &raw const about as u64,
        about_bytes: size_of::<TaskInfo>() as u32,
        ..LinkAttributes::default()
    };
    made("point a BPF program at a process", bpf(BPF_LINK_CREATE, &mut attributes))
}

/// Something to read once, which runs the program of a link.
pub(crate) fn iterator(link: &OwnedFd) -> Result<OwnedFd> {
    let mut attributes = [link.as_raw_fd() as u32, 0];
    made("run a BPF program", bpf(BPF_ITER_CREATE, &mut attributes))
}
