//! epoll registrations under foreign descriptor numbers.
//!
//! epoll(7) remembers a registration by the pair (open file description, descriptor number), and
//! the number must be the guest's, or its later `EPOLL_CTL_MOD` and `DEL` would not find it. So
//! registrations are made by a thread with a descriptor table of its own, in which each target
//! sits for an instant at the number it has in the guest.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use crate::error::{KernelError, Result, check};

/// One registration to make.
#[derive(Clone, Copy, Debug)]
pub struct Registration<'a> {
    /// The epoll instance.
    pub epoll: BorrowedFd<'a>,
    /// What it watches.
    pub target: BorrowedFd<'a>,
    /// Under which number.
    pub number: i32,
    /// `EPOLL*` bits.
    pub events: u32,
    /// `epoll_data`.
    pub data: u64,
}

/// Makes all `registrations`, in order.
///
/// They last as long as the target's description does, in whatever table. On failure those in
/// front of the failing one have been made. The process's limit of descriptors must be above the
/// largest number.
pub fn register(registrations: &[Registration<'_>]) -> Result<()> {
    if registrations.is_empty() {
        return Ok(());
    }
    let done = crate::namespace::on_a_thread(|| register_in_own_table(registrations));
    done.map_err(KernelError::io("start a thread"))?
}

fn register_in_own_table(registrations: &[Registration<'_>]) -> Result<()> {
    // SAFETY: from here on this thread's table is its own; nobody else sees what it does there,
    // and it uses no descriptor but those of `registrations` and duplicates it makes.
    let ret = unsafe { libc::unshare(libc::CLONE_FILES) };
    check("leave shared descriptor table", ret.into())?;
    let above = registrations.iter().map(|each| each.number).max().unwrap_or(0) + 1;
    // The numbers to be used may hold the very descriptors we need: move those up first.
    let mut moved: HashMap<RawFd, RawFd> = HashMap::new();
    for each in registrations {
        for fd in [each.epoll.as_raw_fd(), each.target.as_raw_fd()] {
            if fd < above && !moved.contains_key(&fd) {
                // SAFETY: no pointer is passed.
                let up = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, above) };
                moved.insert(fd, check("move descriptor", up.into())? as RawFd);
            }
        }
    }
    for each in registrations {
        let place = |fd: RawFd| *moved.get(&fd).unwrap_or(&fd);
        register_one(each, place(each.epoll.as_raw_fd()), place(each.target.as_raw_fd()))?;
    }
    Ok(())
}

fn register_one(each: &Registration<'_>, epoll: RawFd, target: RawFd) -> Result<()> {
    // SAFETY: the table is this thread's own; `number` is not one of the descriptors still needed.
    let ret = unsafe { libc::dup3(target, each.number, libc::O_CLOEXEC) };
    check("place epoll target", ret.into())?;
    let mut event = libc::epoll_event { events: each.events, u64: each.data };
    // SAFETY: `event` outlives the call.
    let ret = unsafe { libc::epoll_ctl(epoll, libc::EPOLL_CTL_ADD, each.number, &raw mut event) };
    check("watch with epoll", ret.into()).map(drop)
}

/// The bytes of a `struct epoll_event`, for a call made inside the ghost (packed on x86-64).
pub fn event_bytes(events: u32, data: u64) -> Vec<u8> {
    let mut bytes = events.to_ne_bytes().to_vec();
    bytes.extend_from_slice(&data.to_ne_bytes());
    debug_assert_eq!(bytes.len(), size_of::<libc::epoll_event>());
    bytes
}

/// An epoll instance.
pub fn create() -> Result<OwnedFd> {
    // SAFETY: no pointer is passed.
    let fd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
    let fd = check("create epoll", fd.into())?;
    // SAFETY: the kernel just gave us this descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}
