//! Memory shared between our process and another, reached by copying only.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;

use crate::error::{KernelError, Result};

/// A `MAP_SHARED` mapping of ours. The other side may change it at any time, so there are no
/// references into it: bytes are copied in and out.
#[derive(Debug)]
pub struct SharedMapping {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping is plain memory; all access is by copy through raw pointers.
unsafe impl Send for SharedMapping {}

impl SharedMapping {
    /// Maps the first `bytes` bytes of `file` for reading and writing.
    pub fn new(file: BorrowedFd<'_>, bytes: usize) -> Result<Self> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let null = std::ptr::null_mut();
        let fd = file.as_raw_fd();
        // SAFETY: a fresh mapping at an address the kernel picks.
        let start = unsafe { libc::mmap(null, bytes, protection, libc::MAP_SHARED, fd, 0) };
        if start == libc::MAP_FAILED {
            return Err(KernelError::last("map shared memory"));
        }
        let start = NonNull::new(start.cast()).expect("mmap does not return null");
        Ok(Self { start, bytes })
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    fn at(&self, offset: usize, bytes: usize) -> *mut u8 {
        let end = offset.checked_add(bytes).expect("offset overflows");
        assert!(end <= self.bytes, "shared mapping: {offset}+{bytes} of {}", self.bytes);
        self.start.as_ptr().wrapping_add(offset)
    }

    /// Copies `source` to `offset`. Panics outside the mapping.
    pub fn write(&self, offset: usize, source: &[u8]) {
        let target = self.at(offset, source.len());
        // SAFETY: `at` checked the bounds; the ranges cannot overlap, ours is not shared.
        unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), target, source.len()) };
    }

    /// Copies from `offset` into `target`. Panics outside the mapping.
    pub fn read(&self, offset: usize, target: &mut [u8]) {
        let source = self.at(offset, target.len());
        // SAFETY: `at` checked the bounds; the ranges cannot overlap, ours is not shared.
        unsafe { std::ptr::copy_nonoverlapping(source, target.as_mut_ptr(), target.len()) };
    }

    /// Writes a word.
    pub fn write_u64(&self, offset: usize, value: u64) {
        self.write(offset, &value.to_ne_bytes());
    }

    /// Reads a word.
    pub fn read_u64(&self, offset: usize) -> u64 {
        let mut word = [0u8; 8];
        self.read(offset, &mut word);
        u64::from_ne_bytes(word)
    }
}

impl Drop for SharedMapping {
    fn drop(&mut self) {
        // SAFETY: nobody holds a reference into the mapping.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}
