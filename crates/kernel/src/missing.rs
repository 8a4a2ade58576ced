//! userfaultfd(2) in missing mode: pages that a process does not have yet come from here.
//!
//! The descriptor is created inside the process, like that of [`crate::userfaultfd`], but without
//! `UFFD_USER_MODE_ONLY`: system calls of the guest touch memory inside the kernel, and must wait
//! for it like any instruction. The events tell what else becomes of registered memory; whoever
//! makes the change waits until its event has been read, and no page can be put in meanwhile
//! ([`Put::Changing`]). So who puts pages in only after reading what there is to read never puts
//! one where it does not belong any more.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use linux_raw_sys::general as raw;

use crate::error::{KernelError, Result, check};

const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
const UFFDIO_WAKE: libc::c_ulong = 0x8010_aa02;
const UFFDIO_COPY: libc::c_ulong = 0xc028_aa03;
const UFFDIO_ZEROPAGE: libc::c_ulong = 0xc020_aa04;

const FEATURES: u64 = (raw::UFFD_FEATURE_EVENT_FORK
    | raw::UFFD_FEATURE_EVENT_REMAP
    | raw::UFFD_FEATURE_EVENT_REMOVE
    | raw::UFFD_FEATURE_EVENT_UNMAP
    | raw::UFFD_FEATURE_EXACT_ADDRESS) as u64;

/// Flags for the userfaultfd(2) call in the process.
pub const FLAGS: u64 = (libc::O_CLOEXEC | libc::O_NONBLOCK) as u64;

/// Messages read at once.
const MESSAGES: usize = 32;

/// What happens to memory with missing pages.
#[derive(Debug)]
pub enum Event {
    /// A thread waits for the page of this address, which it reads or writes (kernel 5.18).
    Fault(u64),
    /// The process has forked; the child has its own descriptor, and misses what this one misses.
    Fork(MissingPages),
    /// mremap(2): these bytes have moved, and are registered where they are now.
    Moved {
        /// First byte before.
        from: u64,
        /// First byte now.
        to: u64,
        /// How many.
        bytes: u64,
    },
    /// madvise(2): these pages have no content any more, or are about to lose it.
    Removed(u64, u64),
    /// munmap(2) and its like: nothing is here any more, or something new.
    Unmapped(u64, u64),
}

/// What became of pages that were to be put in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Put {
    /// They are there now, this many bytes from the start.
    Done(u64),
    /// The address space is being changed: read events, and try again.
    Changing,
    /// The first page is there already.
    There,
    /// No registered mapping has all of the range.
    Elsewhere,
    /// The process has ended, or executes another program.
    Ended,
}

/// Missing pages of one address space. Closing it ends the waiting: whoever waits gets what the
/// kernel has, which is zeroes.
#[derive(Debug)]
pub struct MissingPages(OwnedFd);

impl MissingPages {
    /// Takes a fresh userfaultfd and switches the events on.
    pub fn new(fd: OwnedFd) -> Result<Self> {
        let mut api = raw::uffdio_api { api: raw::UFFD_API as u64, features: FEATURES, ioctls: 0 };
        // SAFETY: `api` is the structure UFFDIO_API reads and writes.
        let done = unsafe { libc::ioctl(fd.as_raw_fd(), UFFDIO_API, &raw mut api) };
        check("switch on loading on demand (CAP_SYS_PTRACE is needed)", done.into())?;
        Ok(Self(fd))
    }

    /// From now on, threads wait where `[start, end)` has no page.
    pub fn register(&self, start: u64, end: u64) -> Result<()> {
        let mut register = raw::uffdio_register {
            range: raw::uffdio_range { start, len: end - start },
            mode: raw::UFFDIO_REGISTER_MODE_MISSING as u64,
            ioctls: 0,
        };
        // SAFETY: `register` is the structure UFFDIO_REGISTER reads and writes.
        let done = unsafe { libc::ioctl(self.0.as_raw_fd(), UFFDIO_REGISTER, &raw mut register) };
        check("register memory for loading on demand", done.into()).map(drop)
    }

    /// Puts whole pages in at `start` and lets those go on that wait for them.
    pub fn copy(&self, start: u64, bytes: &[u8]) -> Result<Put> {
        let mut copy = raw::uffdio_copy {
            dst: start,
            src: bytes.as_ptr() as u64,
            len: bytes.len() as u64,
            mode: 0,
            copy: 0,
        };
        // SAFETY: `src` and `len` describe a borrow that the call only reads.
        let done = unsafe { libc::ioctl(self.0.as_raw_fd(), UFFDIO_COPY, &raw mut copy) };
        outcome("put pages in", done, bytes.len() as u64, copy.copy)
    }

    /// The same with zeroes.
    pub fn zero(&self, start: u64, bytes: u64) -> Result<Put> {
        let mut zero = raw::uffdio_zeropage {
            range: raw::uffdio_range { start, len: bytes },
            mode: 0,
            zeropage: 0,
        };
        // SAFETY: `zero` is the structure UFFDIO_ZEROPAGE reads and writes.
        let done = unsafe { libc::ioctl(self.0.as_raw_fd(), UFFDIO_ZEROPAGE, &raw mut zero) };
        outcome("put zero pages in", done, bytes, zero.zeropage)
    }

    /// Lets those try again that wait for a page of this range.
    pub fn wake(&self, start: u64, bytes: u64) -> Result<()> {
        let range = raw::uffdio_range { start, len: bytes };
        // SAFETY: `range` is the structure UFFDIO_WAKE reads.
        let done = unsafe { libc::ioctl(self.0.as_raw_fd(), UFFDIO_WAKE, &raw const range) };
        check("wake threads", done.into()).map(drop)
    }

    /// Appends what has happened since, in order. Does not wait.
    pub fn read(&self, events: &mut Vec<Event>) -> Result<()> {
        loop {
            let mut messages = [[0u64; 4]; MESSAGES];
            let bytes = size_of_val(&messages);
            let fd = self.0.as_raw_fd();
            // SAFETY: the buffer has `bytes` bytes.
            let got = unsafe { libc::read(fd, messages.as_mut_ptr().cast(), bytes) };
            if got < 0 {
                let error = KernelError::last("read what pages are missing");
                return match error.errno() {
                    Some(libc::EAGAIN) => Ok(()),
                    Some(libc::EINTR) => continue,
                    _ => Err(error),
                };
            }
            let count = got as usize / size_of::<raw::uffd_msg>();
            for message in &messages[..count] {
                events.push(event(message)?);
            }
            if count < MESSAGES {
                return Ok(());
            }
        }
    }
}

impl AsFd for MissingPages {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// `struct uffd_msg` (linux/userfaultfd.h): the kind in the first byte, then three words at most.
fn event(message: &[u64; 4]) -> Result<Event> {
    let [kind, one, two, three] = *message;
    Ok(match (kind & 0xff) as u32 {
        // Flags, address, thread.
        raw::UFFD_EVENT_PAGEFAULT => Event::Fault(two),
        raw::UFFD_EVENT_FORK => {
            // SAFETY: the kernel just gave this descriptor to the process that reads.
            let fd = unsafe { OwnedFd::from_raw_fd(one as u32 as i32) };
            Event::Fork(MissingPages(fd))
        }
        raw::UFFD_EVENT_REMAP => Event::Moved { from: one, to: two, bytes: three },
        raw::UFFD_EVENT_REMOVE => Event::Removed(one, two),
        raw::UFFD_EVENT_UNMAP => Event::Unmapped(one, two),
        other => return Err(KernelError::Unexpected(format!("userfaultfd event {other:#x}"))),
    })
}

fn outcome(verb: &'static str, done: i32, wanted: u64, told: i64) -> Result<Put> {
    if done == 0 {
        return Ok(Put::Done(wanted));
    }
    let error = KernelError::last(verb);
    match error.errno() {
        Some(libc::EAGAIN) if told > 0 => Ok(Put::Done(told as u64)),
        Some(libc::EAGAIN) => Ok(Put::Changing),
        Some(libc::EEXIST) => Ok(Put::There),
        Some(libc::ENOENT) => Ok(Put::Elsewhere),
        Some(libc::ESRCH) => Ok(Put::Ended),
        _ => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_structures_are_as_the_kernel_has_them() {
        assert_eq!(size_of::<raw::uffd_msg>(), 32);
        assert_eq!(UFFDIO_COPY >> 16 & 0x3fff, size_of::<raw::uffdio_copy>() as u64);
        assert_eq!(UFFDIO_ZEROPAGE >> 16 & 0x3fff, size_of::<raw::uffdio_zeropage>() as u64);
        assert_eq!(UFFDIO_REGISTER >> 16 & 0x3fff, size_of::<raw::uffdio_register>() as u64);
        assert_eq!(UFFDIO_WAKE >> 16 & 0x3fff, size_of::<raw::uffdio_range>() as u64);
    }

    #[test]
    fn who_reads_a_missing_page_waits_for_it() {
        // SAFETY: no pointer is passed.
        let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, FLAGS) };
        assert!(fd >= 0);
        // SAFETY: the kernel just gave us this descriptor.
        let missing = MissingPages::new(unsafe { OwnedFd::from_raw_fd(fd as i32) }).expect("on");
        let bytes = 16 * 4096;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping, at no particular place.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), bytes, 3, flags, -1, 0) } as u64;
        missing.register(at, at + bytes as u64).expect("registers");
        // SAFETY: the mapping is never unmapped.
        let reader = std::thread::spawn(move || unsafe { ((at + 4096 + 123) as *const u8).read() });
        let mut events = Vec::new();
        while events.is_empty() {
            missing.read(&mut events).expect("reads");
            std::thread::yield_now();
        }
        assert!(matches!(events[..], [Event::Fault(address)] if address == at + 4096 + 123));
        assert_eq!(missing.copy(at + 4096, &[7; 8192]).expect("copies"), Put::Done(8192));
        assert_eq!(reader.join().expect("reads"), 7);
        assert_eq!(missing.copy(at + 8192, &[8; 4096]).expect("says"), Put::There);
        assert_eq!(missing.zero(at + 12288, 4096).expect("fills"), Put::Done(4096));
        let outside = at + bytes as u64;
        assert_eq!(missing.copy(outside, &[8; 4096]).expect("says"), Put::Elsewhere);
        // Part of the range: what could be put in was.
        assert_eq!(missing.copy(at, &[9; 8192]).expect("copies"), Put::Done(4096));
    }
}
