//! Which pages a process has touched, reads included, from the accessed bits of its page tables.
//!
//! The processor sets the bit at the first access after it was cleared (Intel SDM, volume 3,
//! "Accessed and Dirty Flags"), so finding out costs the process nothing. The kernel clears the
//! bits for us (`/proc/PID/clear_refs`) and tells only their number; for one page each it has an
//! interface that most kernels are built without (`CONFIG_IDLE_PAGE_TRACKING`). So two small BPF
//! programs read the page tables. They change nothing. What is read may be out of date, even of
//! another process for a moment: it is good for a guess and no more, and is compared with
//! `/proc/PID/pagemap` first.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;

use crate::bpf::{
    self, EXIT, Instruction, Kind, PROBE_READ_KERNEL, add, copy, function, helper, load, set,
    skip_if_zero, store,
};
use crate::btf::Btf;
use crate::error::{KernelError, Result};
use crate::ptrace::HostPid;
use crate::shared::SharedMapping;

const PAGE: usize = 4096;
/// Pages read with one call.
const PAGES: usize = 32;
const ENTRIES: usize = 512;

const PRESENT: u64 = 1;
const ACCESSED: u64 = 1 << 5;
const LEAF: u64 = 1 << 7;
const FRAME: u64 = 0x000f_ffff_ffff_f000;

/// What the first program is asked and answers.
#[repr(C)]
struct Root {
    pid: u64,
    table: u64,
}

/// What the second is asked. It answers in the buffer.
#[repr(C)]
struct Pages {
    addresses: [u64; PAGES],
}

/// `context.table = task_of(context.pid)->mm->pgd`.
fn find_root(btf: &Btf) -> Option<Vec<Instruction>> {
    let from_pid = btf.function("bpf_task_from_pid")?;
    let release = btf.function("bpf_task_release")?;
    let mm = btf.field("task_struct", "mm")? as i32;
    let pgd = btf.field("mm_struct", "pgd")? as i32;
    Some(vec![
        copy(6, 1),
        load(1, 6, 0),
        function(from_pid),
        skip_if_zero(0, 18),
        copy(7, 0),
        copy(1, 10),
        add(1, -8),
        set(2, 8),
        copy(3, 7),
        add(3, mm),
        helper(PROBE_READ_KERNEL),
        copy(1, 7),
        function(release),
        load(3, 10, -8),
        skip_if_zero(3, 7),
        copy(1, 10),
        add(1, -8),
        set(2, 8),
        add(3, pgd),
        helper(PROBE_READ_KERNEL),
        load(1, 10, -8),
        store(6, 8, 1),
        set(0, 0),
        EXIT,
    ])
}

/// `buffer[i] = *context.addresses[i]`, a page each.
fn read_pages(buffer: &OwnedFd) -> Vec<Instruction> {
    let mut program = vec![copy(6, 1)];
    for page in 0..PAGES {
        program.extend(bpf::value_of(1, buffer, page * PAGE));
        program.extend([
            set(2, PAGE as i32),
            load(3, 6, (page * 8) as i16),
            helper(PROBE_READ_KERNEL),
        ]);
    }
    program.extend([set(0, 0), EXIT]);
    program
}

/// Reads page tables.
#[derive(Debug)]
pub struct PageTables {
    find_root: OwnedFd,
    read_pages: OwnedFd,
    buffer: SharedMapping,
    levels: u32,
    /// Where the kernel has all memory mapped; found with the first process.
    base: Option<u64>,
}

/// Those of one address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableRoot(u64);

impl PageTables {
    /// Loads the programs. Needs CAP_BPF and CAP_PERFMON, and a kernel that describes its types.
    pub fn open() -> Result<Self> {
        let program = find_root(&Btf::of_kernel()?);
        let program = program
            .ok_or_else(|| KernelError::Unexpected("the kernel's types of a process".into()))?;
        let processor = std::fs::read_to_string("/proc/cpuinfo");
        let processor = processor.map_err(KernelError::io("read /proc/cpuinfo"))?;
        let deep = processor.split_ascii_whitespace().any(|word| word == "la57");
        let buffer = bpf::make_buffer(PAGES * PAGE)?;
        Ok(Self {
            find_root: Kind::Called.load(&program)?,
            read_pages: Kind::Called.load(&read_pages(&buffer))?,
            buffer: SharedMapping::new(buffer.as_fd(), PAGES * PAGE)?,
            levels: if deep { 5 } else { 4 },
            base: None,
        })
    }

    /// The tables of a process. Its `witness` is an address with a page: what is read is compared
    /// with what `/proc/PID/pagemap` says of it.
    pub fn root(&mut self, pid: HostPid, witness: u64) -> Result<TableRoot> {
        let mut asked = Root { pid: pid.0 as u64, table: 0 };
        bpf::run(&self.find_root, &mut asked)?;
        if asked.table == 0 {
            return Err(KernelError::Died(pid));
        }
        let root = TableRoot(asked.table);
        let frame = frame_of(pid, witness)?;
        if let Some(base) = self.base {
            let seen = self.walk(base, root, witness)?;
            return if seen == Some(frame) { Ok(root) } else { Err(unlike()) };
        }
        // All memory is mapped from an address on that is random but for these bits.
        const STEP: u64 = 1 << 30;
        const MOST: u64 = 1 << 14;
        let last = asked.table & !(STEP - 1);
        for base in (0..MOST).map(|steps| last.wrapping_sub(steps * STEP)) {
            if self.walk(base, root, witness)? == Some(frame) {
                self.base = Some(base);
                return Ok(root);
            }
        }
        Err(unlike())
    }

    /// Whether the process still has these tables: it has executed no other program.
    pub fn is_root_of(&self, pid: HostPid, root: TableRoot) -> Result<bool> {
        let mut asked = Root { pid: pid.0 as u64, table: 0 };
        bpf::run(&self.find_root, &mut asked)?;
        Ok(asked.table == root.0)
    }

    fn walk(&self, base: u64, root: TableRoot, address: u64) -> Result<Option<u64>> {
        let mut table = root.0;
        for level in (0..self.levels).rev() {
            let mut read = [0; ENTRIES];
            self.read(&[table], &mut |_, page| read = *page)?;
            let entry = read[(address >> (12 + 9 * level)) as usize % ENTRIES];
            if entry & PRESENT == 0 {
                return Ok(None);
            }
            if level == 0 {
                return Ok(Some((entry & FRAME) >> 12));
            }
            if entry & LEAF != 0 {
                let inside = (1u64 << (12 + 9 * level)) - 1;
                return Ok(Some(((entry & FRAME & !inside) + (address & inside)) >> 12));
            }
            table = base.wrapping_add(entry & FRAME);
        }
        Ok(None)
    }

    /// Hands on the kernel's pages at `addresses`.
    fn read(&self, addresses: &[u64], take: &mut dyn FnMut(usize, &[u64; ENTRIES])) -> Result<()> {
        let (mut bytes, mut entries) = ([0; PAGE], [0; ENTRIES]);
        for (index, chunk) in addresses.chunks(PAGES).enumerate() {
            // An address that is not there costs a fault, so the rest is the first once more.
            let mut pages = Pages { addresses: [chunk[0]; PAGES] };
            pages.addresses[..chunk.len()].copy_from_slice(chunk);
            bpf::run(&self.read_pages, &mut pages)?;
            for at in 0..chunk.len() {
                self.buffer.read(at * PAGE, &mut bytes);
                for (entry, bytes) in entries.iter_mut().zip(bytes.chunks_exact(8)) {
                    *entry = u64::from_ne_bytes(bytes.try_into().unwrap_or_default());
                }
                take(index * PAGES + at, &entries);
            }
        }
        Ok(())
    }

    /// Calls `found` with each range of pages in one of `ranges` that was touched since
    /// [`forget_touches`], in address order.
    pub fn touched(
        &mut self,
        root: TableRoot,
        ranges: &[(u64, u64)],
        found: &mut dyn FnMut(u64, u64),
    ) -> Result<()> {
        let Some(base) = self.base else { return Ok(()) };
        // The tables of each level, with the address where each begins.
        let mut tables = vec![(0u64, root.0)];
        for level in (0..self.levels).rev() {
            let mut below = Vec::new();
            let reach = 1u64 << (12 + 9 * level);
            let addresses: Vec<u64> = tables.iter().map(|(_, table)| *table).collect();
            self.read(&addresses, &mut |index, entries| {
                let start = tables[index].0;
                for (number, entry) in entries.iter().enumerate() {
                    let from = start + number as u64 * reach;
                    if entry & PRESENT == 0 || !touches(ranges, from, from + reach) {
                        continue;
                    }
                    if level == 0 || entry & LEAF != 0 {
                        if entry & ACCESSED != 0 {
                            found(from, from + reach);
                        }
                    } else if from >> 47 == 0 {
                        below.push((from, base.wrapping_add(entry & FRAME)));
                    }
                }
            })?;
            tables = below;
        }
        Ok(())
    }
}

fn unlike() -> KernelError {
    KernelError::Unexpected("page tables that were read".into())
}

fn touches(ranges: &[(u64, u64)], start: u64, end: u64) -> bool {
    let after = ranges.partition_point(|range| range.1 <= start);
    ranges.get(after).is_some_and(|range| range.0 < end)
}

/// The page frame behind an address.
fn frame_of(pid: HostPid, address: u64) -> Result<u64> {
    if let Some(frame) = present_frame(pid, address)? {
        return Ok(frame);
    }
    // It is paged out, or being moved: whoever reads it has it put there, and waits for that.
    let memory = File::open(format!("/proc/{pid}/mem")).map_err(KernelError::io("open memory"))?;
    memory.read_exact_at(&mut [0], address).map_err(KernelError::io("read memory"))?;
    let frame = present_frame(pid, address)?;
    frame.ok_or_else(|| KernelError::Unexpected(format!("no page at {address:#x}")))
}

/// The page frame that is mapped at an address (pagemap(5): bits 0 to 54 of a present entry).
fn present_frame(pid: HostPid, address: u64) -> Result<Option<u64>> {
    let file =
        File::open(format!("/proc/{pid}/pagemap")).map_err(KernelError::io("open pagemap"))?;
    let mut entry = [0; 8];
    file.read_exact_at(&mut entry, address / PAGE as u64 * 8)
        .map_err(KernelError::io("read pagemap"))?;
    let entry = u64::from_ne_bytes(entry);
    Ok((entry >> 63 == 1).then_some(entry & ((1 << 55) - 1)))
}

/// Clears the accessed bits of all pages of a process (proc(5), clear_refs). What processors
/// remember of its page tables stays: pages that they know are not seen until that is flushed.
pub fn forget_touches(pid: HostPid) -> Result<()> {
    std::fs::write(format!("/proc/{pid}/clear_refs"), "1")
        .map_err(KernelError::io("clear accessed bits"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_that_is_not_there_is_brought() {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping, at no particular place.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), PAGE, 3, flags, -1, 0) } as u64;
        let own = HostPid(std::process::id() as i32);
        assert_eq!(present_frame(own, at).unwrap(), None);
        let frame = frame_of(own, at).unwrap();
        assert_eq!(present_frame(own, at).unwrap(), Some(frame));
        // SAFETY: nobody has the mapping.
        unsafe { libc::munmap(at as *mut libc::c_void, PAGE) };
        assert!(frame_of(own, at).is_err());
    }

    /// A child that has touched all of a mapping, and then after a signal only some of it.
    #[test]
    fn pages_that_are_read_are_seen() {
        let bytes = 4096 * 4096usize;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping, at no particular place.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), bytes, 3, flags, -1, 0) } as usize;
        let touch = |page: usize, write: bool| {
            let place = (at + page * PAGE) as *mut u8;
            if write {
                // SAFETY: in the mapping, which is never unmapped.
                unsafe { place.write_volatile(1) }
            } else {
                // SAFETY: in the mapping, which is never unmapped.
                let _: u8 = unsafe { place.read_volatile() };
            }
        };
        (0..4096).for_each(|page| touch(page, true));
        let own = HostPid(std::process::id() as i32);
        let mut tables = PageTables::open().expect("opens");
        let root = tables.root(own, at as u64).expect("finds the tables");
        forget_touches(own).expect("clears");
        // More pages than are flushed one by one, so that everything is.
        let (none, populated) = (std::ptr::null_mut(), flags | libc::MAP_POPULATE);
        // SAFETY: a new mapping, at no particular place.
        let other = unsafe { libc::mmap(none, 64 * PAGE, 3, populated, -1, 0) };
        // SAFETY: nobody has the mapping.
        unsafe { libc::munmap(other, 64 * PAGE) };
        let wanted: Vec<usize> = (0..4096).filter(|page| page % 7 == 3).collect();
        wanted.iter().for_each(|page| touch(*page, page % 2 == 0));
        let mut seen = Vec::new();
        let range = (at as u64, (at + bytes) as u64);
        let began = std::time::Instant::now();
        tables
            .touched(root, &[range], &mut |from, to| {
                seen.extend((from..to).step_by(PAGE).map(|at| (at - range.0) as usize / PAGE));
            })
            .expect("reads");
        eprintln!("{:?} for {} pages", began.elapsed(), 4096);
        assert_eq!(seen, wanted);
        assert!(tables.is_root_of(own, root).expect("asks"));
    }
}
