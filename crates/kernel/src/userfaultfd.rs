//! userfaultfd(2) in asynchronous write-protect mode (kernel 6.7, `UFFD_FEATURE_WP_ASYNC`).
//!
//! The descriptor is created inside the guest, fetched with `pidfd_getfd` and driven from here:
//! its ioctls work on the address space it was created in, whoever calls them.

use std::os::fd::{AsRawFd, OwnedFd};

use linux_raw_sys::general as raw;

use crate::error::{KernelError, Result, check};

const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
const UFFDIO_WRITEPROTECT: libc::c_ulong = 0xc018_aa06;

/// Features the capture needs: resolve write faults in the kernel, and protect pages that are not
/// there yet, and memory that is not anonymous.
const FEATURES: u64 = (raw::UFFD_FEATURE_WP_ASYNC
    | raw::UFFD_FEATURE_WP_UNPOPULATED
    | raw::UFFD_FEATURE_WP_HUGETLBFS_SHMEM
    | raw::UFFD_FEATURE_PAGEFAULT_FLAG_WP) as u64;

/// Tracks writes of one address space. Closing it ends the tracking.
#[derive(Debug)]
pub struct WriteTracker(OwnedFd);

impl WriteTracker {
    /// Takes a fresh userfaultfd and switches the features on.
    pub fn new(fd: OwnedFd) -> Result<Self> {
        let mut api = raw::uffdio_api { api: raw::UFFD_API as u64, features: FEATURES, ioctls: 0 };
        // SAFETY: `api` is the structure UFFDIO_API reads and writes.
        let done = unsafe { libc::ioctl(fd.as_raw_fd(), UFFDIO_API, &raw mut api) };
        check("switch on write tracking (kernel 6.7 or newer is needed)", done.into())?;
        Ok(Self(fd))
    }

    /// Registers `[start, end)`, which must lie in mappings. Registering again is harmless.
    pub fn register(&self, start: u64, end: u64) -> Result<()> {
        let mut register = raw::uffdio_register {
            range: raw::uffdio_range { start, len: end - start },
            mode: raw::UFFDIO_REGISTER_MODE_WP as u64,
            ioctls: 0,
        };
        // SAFETY: `register` is the structure UFFDIO_REGISTER reads and writes.
        let done = unsafe { libc::ioctl(self.0.as_raw_fd(), UFFDIO_REGISTER, &raw mut register) };
        check("register memory for write tracking", done.into()).map(drop)
    }

    /// Takes the write protection off every page of `[start, end)`, which must be registered, so
    /// that each counts as written until it is armed.
    ///
    /// Registering leaves the marks of an earlier registration in the page table. mremap(2) can
    /// end a registration and keep them: a registered mapping that is moved next to another one
    /// and joins it ends the registration of both. A page that became writable without tracking
    /// and still has its mark would look unwritten for good.
    pub fn unprotect(&self, start: u64, end: u64) -> Result<()> {
        let mut protect = raw::uffdio_writeprotect {
            range: raw::uffdio_range { start, len: end - start },
            mode: 0,
        };
        // SAFETY: `protect` is the structure UFFDIO_WRITEPROTECT reads.
        let done =
            unsafe { libc::ioctl(self.0.as_raw_fd(), UFFDIO_WRITEPROTECT, &raw mut protect) };
        check("take write protection off", done.into()).map(drop)
    }
}

/// Opens a userfaultfd for the calling process, to learn whether the kernel can track writes.
pub fn probe() -> Result<()> {
    own().map(drop)
}

/// A tracker of the calling process.
pub(crate) fn own() -> Result<WriteTracker> {
    use std::os::fd::FromRawFd;
    // SAFETY: no pointer is passed.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) };
    if fd < 0 {
        return Err(KernelError::last("create userfaultfd"));
    }
    // SAFETY: the kernel just gave us this descriptor.
    WriteTracker::new(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}
