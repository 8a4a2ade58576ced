//! Real-time scheduling and locked memory for one thread (sched(7), mlock(2)).

use std::marker::PhantomData;

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

/// While this lives, the calling thread goes before ordinary ones, if it may; else nothing changes.
/// For moments in which others wait for this thread and can do nothing else.
#[derive(Debug)]
pub struct Urgent {
    before: (i32, i32),
    /// A schedule belongs to the thread that asked for it.
    _own: PhantomData<*const ()>,
}

impl Urgent {
    /// From now on, at `priority` (1 to 99). A thread that is urgent anyway stays as it is.
    pub fn begin(priority: i32) -> Option<Self> {
        let before = schedule()?;
        let ordinary = before.0 & !libc::SCHED_RESET_ON_FORK == libc::SCHED_OTHER;
        let begun = ordinary && schedule_fifo(priority).is_ok();
        begun.then_some(Self { before, _own: PhantomData })
    }
}

impl Drop for Urgent {
    fn drop(&mut self) {
        let param = libc::sched_param { sched_priority: self.before.1 };
        // SAFETY: `param` is valid for the call; 0 names the calling thread. Who could raise it can
        // lower it.
        unsafe { libc::sched_setscheduler(0, self.before.0, &param) };
    }
}

/// A thread of this program that others may hurry.
#[derive(Clone, Copy, Debug)]
pub struct Hurried(i32);

impl Hurried {
    /// The calling thread, which is an ordinary one.
    #[must_use]
    pub fn this() -> Self {
        // SAFETY: takes no arguments and cannot fail.
        Self(unsafe { libc::gettid() })
    }

    /// Lets it go before ordinary threads, if that may be, while `wait` waits for it.
    pub fn hurry<T>(self, priority: i32, wait: impl FnOnce() -> T) -> T {
        let policy = libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK;
        let hurried = self.schedule(policy, priority);
        let waited = wait();
        if hurried {
            self.schedule(libc::SCHED_OTHER, 0);
        }
        waited
    }

    fn schedule(self, policy: i32, sched_priority: i32) -> bool {
        let param = libc::sched_param { sched_priority };
        // SAFETY: `param` is valid for the call; a thread that has ended is no error to memory.
        unsafe { libc::sched_setscheduler(self.0, policy, &param) == 0 }
    }
}

/// Policy and priority of the calling thread.
fn schedule() -> Option<(i32, i32)> {
    let mut param = libc::sched_param { sched_priority: 0 };
    // SAFETY: `param` is writable; 0 names the calling thread.
    let got = unsafe { libc::sched_getparam(0, &mut param) };
    // SAFETY: 0 names the calling thread.
    let policy = unsafe { libc::sched_getscheduler(0) };
    (got == 0 && policy >= 0).then_some((policy, param.sched_priority))
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
    fn urgency_ends_and_leaves_what_was() {
        let policies = std::thread::spawn(|| {
            let policy = || schedule().map(|(policy, _)| policy & !libc::SCHED_RESET_ON_FORK);
            let urgent = Urgent::begin(1);
            let (begun, during) = (urgent.is_some(), policy());
            drop(urgent);
            let after = policy();
            // The heart's priority is not lowered.
            let heart = schedule_fifo(10).is_ok();
            let _urgent = Urgent::begin(1);
            (begun, during, after, heart, schedule())
        });
        let (begun, during, after, heart, last) = policies.join().unwrap();
        assert_eq!(during == Some(libc::SCHED_FIFO), begun);
        assert_eq!((after, begun), (Some(libc::SCHED_OTHER), heart));
        assert_eq!(last.is_some_and(|(_, priority)| priority == 10), heart);
    }

    #[test]
    fn a_thread_is_hurried_while_somebody_waits_for_it() {
        let (tell, told) = std::sync::mpsc::channel();
        let (ask, asked) = std::sync::mpsc::channel::<()>();
        let (answer, answers) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            tell.send(Hurried::this()).unwrap();
            for () in asked {
                let policy = schedule().map(|(policy, _)| policy & !libc::SCHED_RESET_ON_FORK);
                answer.send(policy).unwrap();
            }
        });
        let hurried = told.recv().unwrap();
        let policy = || {
            ask.send(()).unwrap();
            answers.recv().unwrap()
        };
        let may = std::thread::spawn(|| schedule_fifo(1).is_ok()).join().unwrap();
        assert_eq!(hurried.hurry(1, policy) == Some(libc::SCHED_FIFO), may);
        assert_eq!(policy(), Some(libc::SCHED_OTHER));
        drop(ask);
        thread.join().unwrap();
    }

    #[test]
    fn a_small_stack_can_be_locked() {
        let builder = std::thread::Builder::new().stack_size(64 << 10);
        builder.spawn(|| lock_stack().unwrap()).unwrap().join().unwrap();
    }
}
