//! `PAGEMAP_SCAN` on `/proc/PID/pagemap` (kernel 6.7, Documentation/admin-guide/mm/pagemap.rst).

use std::fs::File;
use std::os::fd::AsRawFd;

use linux_raw_sys::general as raw;

use crate::error::{KernelError, Result};
use crate::ptrace::HostPid;

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
}

/// How a scan ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scanned {
    /// The whole range was walked.
    Complete,
    /// A mapping in the range is not registered for write tracking (only with `rearm`); pages
    /// below this address were walked.
    NotTracked(u64),
}

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
        let flags = if query.rearm {
            u64::from(raw::PM_SCAN_WP_MATCHING | raw::PM_SCAN_CHECK_WPASYNC)
        } else {
            0
        };
        while at < end {
            let mut arguments = raw::pm_scan_arg {
                size: size_of::<raw::pm_scan_arg>() as u64,
                flags,
                start: at,
                end,
                walk_end: 0,
                vec: self.buffer.as_mut_ptr() as u64,
                vec_len: self.buffer.len() as u64,
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
                if error.errno() == Some(libc::EPERM) && query.rearm {
                    return Ok(Scanned::NotTracked(at));
                }
                return Err(error);
            }
            found.extend_from_slice(&self.buffer[..count as usize]);
            if arguments.walk_end <= at {
                break;
            }
            at = arguments.walk_end;
        }
        Ok(Scanned::Complete)
    }
}
