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
}

impl Pagemap {
    /// Opens the page map of a process. It follows the address space the process has now, not
    /// one it gets by execve(2) later.
    pub fn open(pid: HostPid) -> Result<Self> {
        let path = format!("/proc/{pid}/pagemap");
        let file = File::open(path).map_err(KernelError::io("open pagemap"))?;
        Ok(Self { file, buffer: vec![Region::default(); 4096] })
    }

    /// Walks `[start, end)` and appends what `query` matches to `found`, in address order.
    pub fn scan(
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
    const BYTES: usize = 8 << 20;
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE);
    let anywhere = std::ptr::null_mut();
    // SAFETY: a new mapping at an address of the kernel's choice.
    let memory =
        unsafe { libc::mmap(anywhere, BYTES, protection, flags | libc::MAP_ANONYMOUS, -1, 0) };
    if memory == libc::MAP_FAILED {
        return Err(KernelError::last("map memory"));
    }
    let (start, end) = (memory as u64, memory as u64 + BYTES as u64);
    let query = Query {
        all_of: category::WRITTEN,
        report: category::WRITTEN,
        tracked: true,
        ..Query::default()
    };
    let told = userfaultfd::own().and_then(|tracker| {
        tracker.register(start, end)?;
        let mut found = Vec::new();
        let own = HostPid(std::process::id() as i32);
        let scanned = Pagemap::open(own)?.scan(start, end, query, &mut found)?;
        let told: u64 = found.iter().map(|region| region.end - region.start).sum();
        Ok(scanned == Scanned::Complete && told == BYTES as u64)
    });
    // SAFETY: the mapping was just made, and nothing points into it.
    unsafe { libc::munmap(memory, BYTES) };
    told
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
}
