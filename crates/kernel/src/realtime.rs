//! Real-time scheduling and locked memory for one thread (sched(7), mlock(2)).

use crate::error::{KernelError, Result, check};

/// Gives the calling thread `SCHED_FIFO` at `priority` (1 to 99); threads and processes it starts
/// are ordinary again. Needs CAP_SYS_NICE or RLIMIT_RTPRIO. Such a thread must block often: the
/// kernel takes 50 ms of every second from one that spins.
pub fn schedule_fifo(priority: i32) -> Result<()> {
    let param = libc::sched_param { sched_priority: priority };
    let policy = libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK;
    // SAFETY: `param` is valid for the call; 0 names the calling thread.
    let done = unsafe { libc::sched_setscheduler(0, policy, &param) };
    check("schedule the thread first in, first out", done.into()).map(drop)
}

/// Locks the calling thread's stack in memory, so that it never waits for a page. Needs
/// CAP_IPC_LOCK or RLIMIT_MEMLOCK for the stack's size.
pub fn lock_stack() -> Result<()> {
    let verb = "lock the thread's stack in memory";
    // SAFETY: the structure is plain bytes, filled in by the next call.
    let mut attributes: libc::pthread_attr_t = unsafe { std::mem::zeroed() };
    // SAFETY: takes no arguments and cannot fail.
    let thread = unsafe { libc::pthread_self() };
    // SAFETY: `thread` is the calling thread and `attributes` is writable.
    let errno = unsafe { libc::pthread_getattr_np(thread, &mut attributes) };
    if errno != 0 {
        return Err(KernelError::from_errno(verb, errno));
    }
    let (mut start, mut length) = (std::ptr::null_mut(), 0);
    // SAFETY: `attributes` was filled in above; both results are writable.
    let errno = unsafe { libc::pthread_attr_getstack(&attributes, &mut start, &mut length) };
    // SAFETY: `attributes` was filled in above and is not used again.
    unsafe { libc::pthread_attr_destroy(&mut attributes) };
    if errno != 0 {
        return Err(KernelError::from_errno(verb, errno));
    }
    // SAFETY: locking changes no memory, whatever the range.
    let done = unsafe { libc::mlock(start, length) };
    check(verb, done.into()).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_gets_its_schedule_or_is_told_why_not() {
        let outcome = std::thread::spawn(|| {
            let fifo = schedule_fifo(10);
            // SAFETY: asks about the calling thread.
            let policy = unsafe { libc::sched_getscheduler(0) };
            (fifo, policy & !libc::SCHED_RESET_ON_FORK)
        });
        match outcome.join().unwrap() {
            (Ok(()), policy) => assert_eq!(policy, libc::SCHED_FIFO),
            (Err(error), policy) => {
                assert_eq!(error.errno(), Some(libc::EPERM), "{error}");
                assert_eq!(policy, libc::SCHED_OTHER);
            }
        }
    }

    #[test]
    fn a_small_stack_can_be_locked() {
        let builder = std::thread::Builder::new().stack_size(64 << 10);
        builder.spawn(|| lock_stack().unwrap()).unwrap().join().unwrap();
    }
}
