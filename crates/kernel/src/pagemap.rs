//! `PAGEMAP_SCAN` on `/proc/PID/pagemap` (kernel 6.7, Documentation/admin-guide/mm/pagemap.rst).

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

use linux_raw_sys::general as raw;

use crate::error::{KernelError, Result};
use crate::ptrace::HostPid;
use crate::userfaultfd;

const PAGEMAP_SCAN: libc::c_ulong = 0xc060_6610;

/// Page categories, `PAGE_IS_*`.
pub mod category {
    /// Asynchronous write protection is on for the mapping.
    pub const WP_ALLOWED: u64 = 1;
    /// Written since it was last armed.
    pub const WRITTEN: u64 = 1 << 1;
    /// Page of a file, or of shared memory.
    pub const FILE: u64 = 1 << 2;
    /// In memory.
    pub const PRESENT: u64 = 1 << 3;
    /// In swap.
    pub const SWAPPED: u64 = 1 << 4;
    /// The shared zero page.
    pub const ZERO: u64 = 1 << 5;
    /// Part of a huge page.
    pub const HUGE: u64 = 1 << 6;
}

/// A run of pages with the same categories.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Region {
    /// First byte.
    pub start: u64,
    /// One past the last byte.
    pub end: u64,
    /// Set of [`category`] bits, restricted to those asked for.
    pub categories: u64,
}

/// What a scan looks for.
#[derive(Clone, Copy, Debug, Default)]
pub struct Query {
    /// Pages with any of these categories are reported.
    pub any_of: u64,
    /// Pages must have all of these.
    pub all_of: u64,
    /// These are inverted before the test.
    pub inverted: u64,
    /// Categories reported.
    pub report: u64,
    /// Write-protect the reported pages that were written, in the same step.
    pub rearm: bool,
    /// Stop where a mapping is not registered for write tracking, as with `rearm`.
    pub tracked: bool,
}

impl Query {
    /// Whether it asks for "not armed" and nothing else, for which the kernel takes a shorter way.
    fn is_short(self) -> bool {
        let written = category::WRITTEN;
        (self.all_of, self.report) == (written, written) && (self.any_of, self.inverted) == (0, 0)
    }
}

/// Whatever is not armed: pages that were written, and what is empty. The kernel has a shorter way
/// for exactly this.
pub const NOT_ARMED: Query = Query {
    any_of: 0,
    all_of: category::WRITTEN,
    inverted: 0,
    report: category::WRITTEN,
    rearm: false,
    tracked: true,
};

/// How a scan ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scanned {
    /// The whole range was walked.
    Complete,
    /// A mapping in the range is not registered for write tracking (only with `rearm` or
    /// `tracked`); pages below this address were walked.
    NotTracked(u64),
}

/// A pagemap entry (Documentation/admin-guide/mm/pagemap.rst): swapped, and the kind of swap entry
/// in the lowest bits.
const SWAPPED_BIT: u64 = 1 << 62;
const SWAP_KIND: u64 = 0x1f;
/// `SWP_PTE_MARKER`, always the last kind (include/linux/swap.h). Told to who has CAP_SYS_ADMIN.
const MARKER_KIND: u64 = 0x1f;
/// Entries read at once.
const ENTRIES: u64 = 128;

/// `/proc/PID/pagemap`.
#[derive(Debug)]
pub struct Pagemap {
    file: File,
    buffer: Vec<Region>,
    misreads_swap: bool,
}

impl Pagemap {
    /// Opens the page map of a process. It follows the address space the process has now, not
    /// one it gets by execve(2) later.
    pub fn open(pid: HostPid) -> Result<Self> {
        let path = format!("/proc/{pid}/pagemap");
        let file = File::open(path).map_err(KernelError::io("open pagemap"))?;
        let misreads_swap = misreads_swap()?;
        Ok(Self { file, buffer: vec![Region::default(); 4096], misreads_swap })
    }

    /// Walks `[start, end)` and appends what `query` matches to `found`, in address order.
    pub fn scan(
        &mut self,
        start: u64,
        end: u64,
        query: Query,
        found: &mut Vec<Region>,
    ) -> Result<Scanned> {
        let first = found.len();
        let scanned = self.walk(start, end, query, found)?;
        if !self.misreads_swap || !query.is_short() || scanned != Scanned::Complete {
            return Ok(scanned);
        }
        let all_of = query.all_of | category::SWAPPED;
        let swapped = Query { all_of, ..query };
        let scanned = self.walk(start, end, swapped, found)?;
        let together = joined(found.split_off(first));
        found.extend(together);
        Ok(scanned)
    }

    fn walk(
        &mut self,
        start: u64,
        end: u64,
        query: Query,
        found: &mut Vec<Region>,
    ) -> Result<Scanned> {
        let mut at = start;
        let rearm = if query.rearm { raw::PM_SCAN_WP_MATCHING } else { 0 };
        let tracked = query.rearm || query.tracked;
        let check = if tracked { raw::PM_SCAN_CHECK_WPASYNC } else { 0 };
        let flags = u64::from(rearm | check);
        while at < end {
            // The kernel makes room for as many, so no more than there can be.
            let room = (self.buffer.len() as u64).min((end - at) / 4096 + 1);
            let mut arguments = raw::pm_scan_arg {
                size: size_of::<raw::pm_scan_arg>() as u64,
                flags,
                start: at,
                end,
                walk_end: 0,
                vec: self.buffer.as_mut_ptr() as u64,
                vec_len: room,
                max_pages: 0,
                category_inverted: query.inverted,
                category_mask: query.all_of,
                category_anyof_mask: query.any_of,
                return_mask: query.report,
            };
            let fd = self.file.as_raw_fd();
            // SAFETY: `vec` points at `vec_len` regions that live through the call.
            let count = unsafe { libc::ioctl(fd, PAGEMAP_SCAN, &raw mut arguments) };
            if count < 0 {
                let error = KernelError::last("scan pagemap");
                if error.errno() == Some(libc::EPERM) && tracked {
                    return Ok(Scanned::NotTracked(at));
                }
                return Err(error);
            }
            found.extend_from_slice(&self.buffer[..count as usize]);
            // The kernel walks 512 regions at a time and leaves `walk_end` where the first part
            // ended if the last one reached the end (do_pagemap_scan, Linux 6.7 to 6.18). So it
            // counts only where the room was not enough, and what was told was walked in any
            // case: told twice, regions would be out of order.
            let told = self.buffer[..count as usize].last().map_or(at, |region| region.end);
            let walked = arguments.walk_end.max(told);
            if (count as u64) < room || walked <= at {
                break;
            }
            at = walked;
        }
        Ok(Scanned::Complete)
    }

    /// Takes out of `regions` what counts as swapped and has no content. Where a page of a private
    /// file mapping is discarded while it is armed, the kernel leaves a marker instead of an empty
    /// entry (`pte_install_uffd_wp_if_needed`, Linux 5.19), and a scan tells it as it tells a page
    /// in swap.
    pub fn without_markers(&self, regions: &mut Vec<Region>) -> Result<()> {
        let is_suspect = |region: &Region| {
            region.categories & (category::SWAPPED | category::PRESENT) == category::SWAPPED
        };
        let suspects: Vec<Region> = regions.iter().copied().filter(is_suspect).collect();
        if suspects.is_empty() {
            return Ok(());
        }
        let mut left = Vec::with_capacity(regions.len());
        let mut entries = Entries { file: &self.file, suspects, first: 0, read: Vec::new() };
        for region in regions.iter() {
            if is_suspect(region) {
                entries.keep_content(*region, &mut left)?;
            } else {
                left.push(*region);
            }
        }
        *regions = left;
        Ok(())
    }
}

/// Whether the shorter way of a scan for what is not armed reads the mark of a page that is in
/// swap, or is being moved, where only a page in memory has it, so that it misses some that were
/// written (mended by commit 2c7ad9a590d1 in Linux 6.9; 6.8.10, too, but not every kernel of a
/// distribution tells what was taken into it).
fn misreads_swap() -> Result<bool> {
    static MISREADS: OnceLock<bool> = OnceLock::new();
    if let Some(known) = MISREADS.get() {
        return Ok(*known);
    }
    let path = "/proc/sys/kernel/osrelease";
    let release = std::fs::read_to_string(path).map_err(KernelError::io("read osrelease"))?;
    Ok(*MISREADS.get_or_init(|| is_older(&release, (6, 9))))
}

/// Whether the release of a kernel is older than this one, or cannot be read.
fn is_older(release: &str, than: (u32, u32)) -> bool {
    let mut numbers = release.split(|at: char| !at.is_ascii_digit()).map(str::parse);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor) < than,
        _ => true,
    }
}

/// Regions in address order, those that meet as one.
fn joined(mut regions: Vec<Region>) -> Vec<Region> {
    regions.sort_unstable_by_key(|region| region.start);
    let mut joined: Vec<Region> = Vec::with_capacity(regions.len());
    for region in regions {
        match joined.last_mut() {
            Some(last) if region.start <= last.end && region.categories == last.categories => {
                last.end = last.end.max(region.end);
            }
            _ => joined.push(region),
        }
    }
    joined
}

/// Entries of a pagemap, those of several regions at a time.
struct Entries<'a> {
    file: &'a File,
    /// The regions that are asked for, in order.
    suspects: Vec<Region>,
    /// The page whose entry is the first of `read`.
    first: u64,
    read: Vec<[u8; 8]>,
}

impl Entries<'_> {
    fn keep_content(&mut self, region: Region, left: &mut Vec<Region>) -> Result<()> {
        for start in (region.start..region.end).step_by(4096) {
            let entry = self.of(start)?;
            let marker = entry & SWAPPED_BIT != 0 && entry & SWAP_KIND == MARKER_KIND;
            let end = start + 4096;
            match left.last_mut() {
                _ if marker => {}
                Some(last) if last.end == start && last.categories == region.categories => {
                    last.end = end;
                }
                _ => left.push(Region { start, end, ..region }),
            }
        }
        Ok(())
    }

    /// That of the page at an address, which lies in one of the regions.
    fn of(&mut self, at: u64) -> Result<u64> {
        let place = |first: u64| (at / 4096).checked_sub(first).map(|place| place as usize);
        let known = place(self.first).and_then(|place| self.read.get(place));
        if let Some(entry) = known {
            return Ok(u64::from_ne_bytes(*entry));
        }
        let far = at + ENTRIES * 4096;
        let near = self.suspects.partition_point(|region| region.start < far);
        let end = self.suspects[..near].last().map_or(far, |last| last.end.min(far));
        self.first = at / 4096;
        self.read.resize((end.div_ceil(4096) - self.first) as usize, [0; 8]);
        let read = self.file.read_exact_at(self.read.as_flattened_mut(), self.first * 8);
        read.map_err(KernelError::io("read pagemap"))?;
        Ok(u64::from_ne_bytes(self.read[0]))
    }
}

/// Whether a scan for pages that are not armed also tells where a tracked mapping has no page
/// table. (Linux 6.18 does.) Learnt from this process itself.
pub fn tells_missing_tables() -> bool {
    static TELLS: OnceLock<bool> = OnceLock::new();
    *TELLS.get_or_init(|| try_missing_tables().unwrap_or(false))
}

fn try_missing_tables() -> Result<bool> {
    let memory = Trial::map(8 << 20)?;
    let (start, end) = (memory.start(), memory.end());
    userfaultfd::own().and_then(|tracker| {
        tracker.register(start, end)?;
        let mut found = Vec::new();
        let own = HostPid(std::process::id() as i32);
        let scanned = Pagemap::open(own)?.scan(start, end, NOT_ARMED, &mut found)?;
        let told: u64 = found.iter().map(|region| region.end - region.start).sum();
        Ok(scanned == Scanned::Complete && told == end - start)
    })
}

/// Memory of this process, to try things with.
struct Trial(std::ptr::NonNull<libc::c_void>, usize);

impl Trial {
    fn map(bytes: usize) -> Result<Self> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let (flags, anywhere) = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, std::ptr::null_mut());
        // SAFETY: a new mapping at an address of the kernel's choice.
        let memory = unsafe { libc::mmap(anywhere, bytes, protection, flags, -1, 0) };
        match std::ptr::NonNull::new(memory) {
            Some(memory) if memory.as_ptr() != libc::MAP_FAILED => Ok(Self(memory, bytes)),
            _ => Err(KernelError::last("map memory")),
        }
    }

    fn start(&self) -> u64 {
        self.0.as_ptr() as u64
    }

    fn end(&self) -> u64 {
        self.start() + self.1 as u64
    }

    #[cfg(test)]
    fn write(&self, at: u64) {
        assert!((at as usize) < self.1);
        let byte = self.0.as_ptr().cast::<u8>().wrapping_add(at as usize);
        // SAFETY: within the mapping, which is only written to here.
        unsafe { byte.write_volatile(1) };
    }

    #[cfg(test)]
    fn page_out(&self) {
        // SAFETY: the content stays.
        let done = unsafe { libc::madvise(self.0.as_ptr(), self.1, libc::MADV_PAGEOUT) };
        assert_eq!(done, 0, "pages out");
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        // SAFETY: the mapping is our own, and nothing points into it.
        unsafe { libc::munmap(self.0.as_ptr(), self.1) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_regions_are_told_once_each() {
        let own = HostPid(std::process::id() as i32);
        let mut memory = vec![0u8; 20 << 20];
        let first = (memory.as_mut_ptr() as u64).next_multiple_of(4096);
        let end = (first + (19 << 20)) & !4095;
        let offset = (first - memory.as_ptr() as u64) as usize;
        let pages = ((end - first) / 4096) as usize;
        for page in (0..pages).step_by(2) {
            memory[offset + page * 4096] = 1;
        }
        let any_of = category::PRESENT | category::SWAPPED;
        let query = Query { any_of, report: any_of, ..Query::default() };
        let mut pagemap = Pagemap::open(own).expect("opens");
        let mut regions = 0;
        // The last round has room for exactly as many as there are.
        for room in [4096, 600, 513, 512, 0] {
            pagemap.buffer = vec![Region::default(); if room == 0 { regions } else { room }];
            let mut found = Vec::new();
            let scanned = pagemap.scan(first, end, query, &mut found).expect("scans");
            assert_eq!(scanned, Scanned::Complete);
            assert!(found.len() > 512 && found.windows(2).all(|two| two[0].end <= two[1].start));
            assert!(found.iter().all(|region| first <= region.start && region.end <= end));
            regions = found.len();
        }
    }

    /// What a kernel before 6.9 needs. On a later one the second walk finds nothing new.
    #[test]
    fn a_scan_that_looks_at_swap_once_more_tells_the_same() {
        const BYTES: u64 = 4 << 20;
        let memory = Trial::map(BYTES as usize).expect("maps");
        let tracker = userfaultfd::own().expect("tracks");
        tracker.register(memory.start(), memory.end()).expect("registers");
        let mut pagemap = Pagemap::open(HostPid(std::process::id() as i32)).expect("opens");
        let mut told = |misreads_swap: bool, rearm: bool| {
            pagemap.misreads_swap = misreads_swap;
            let mut found = vec![Region::default()];
            let query = Query { rearm, ..NOT_ARMED };
            let scanned = pagemap.scan(memory.start(), memory.end(), query, &mut found);
            assert_eq!(scanned.expect("scans"), Scanned::Complete);
            found
        };
        for page in (0..BYTES).step_by(4096) {
            memory.write(page);
        }
        let all =
            Region { start: memory.start(), end: memory.end(), categories: category::WRITTEN };
        assert_eq!(told(true, true)[1..], [all]);
        assert_eq!(told(true, false)[1..], []);
        for page in (0..BYTES).step_by(3 * 4096) {
            memory.write(page);
        }
        // Where there is no swap they stay in memory.
        memory.page_out();
        let written = told(false, false);
        assert_eq!(written.len() as u64, 1 + BYTES.div_ceil(3 * 4096));
        assert_eq!(told(true, false), written);
    }

    #[test]
    fn an_older_kernel_is_known_by_its_release() {
        assert!(is_older("6.8.0-49-generic\n", (6, 9)) && is_older("6.7.12", (6, 9)));
        assert!(is_older("5.15", (6, 9)) && is_older("unknown", (6, 9)));
        assert!(!is_older("6.9.0-rc3", (6, 9)) && !is_older("6.18.44-fc-v669\n", (6, 9)));
        assert!(!is_older("7.0.1", (6, 9)) && !is_older("6.12.0-55.el10", (6, 9)));
    }

    #[test]
    fn regions_that_meet_are_one() {
        let region = |start, end| Region { start, end, categories: category::WRITTEN };
        let apart = vec![region(9, 10), region(1, 3), region(2, 5), region(5, 6)];
        assert_eq!(joined(apart), [region(1, 6), region(9, 10)]);
    }
}
