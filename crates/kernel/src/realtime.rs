//! Real-time scheduling and locked memory for one thread (sched(7), mlock(2)).

use std::marker::PhantomData;

use crate::error::{KernelError, Result, check};

/// Gives the calling thread `SCHED_FIFO` at `priority` (1 to 99); threads and processes it starts
/// are ordinary again. Needs CAP_SYS_NICE or RLIMIT_RTPRIO. Such a thread must block often: the
/// kernel takes 50 ms of every second from one that spins.
pub fn schedule_fifo(priority: i32) -> Result<()> {
    Schedule::first_in_first_out(priority).set(0)
}

/// While this lives, the calling thread goes before ordinary ones, if it may; else nothing changes.
/// For moments in which others wait for this thread and can do nothing else.
#[derive(Debug)]
pub struct Urgent {
    before: Schedule,
    /// A schedule belongs to the thread that asked for it.
    _own: PhantomData<*const ()>,
}

impl Urgent {
    /// From now on, at `priority` (1 to 99). A thread that is urgent anyway stays as it is.
    pub fn begin(priority: i32) -> Option<Self> {
        let before = Schedule::of(0)?;
        let begun = before.is_ordinary() && schedule_fifo(priority).is_ok();
        begun.then_some(Self { before, _own: PhantomData })
    }
}

impl Drop for Urgent {
    fn drop(&mut self) {
        // Who could raise it can lower it.
        let _ = self.before.set(0);
    }
}

/// A thread of this program that others may hurry.
#[derive(Clone, Copy, Debug)]
pub struct Hurried(i32);

impl Hurried {
    /// The calling thread.
    #[must_use]
    pub fn this() -> Self {
        // SAFETY: takes no arguments and cannot fail.
        Self(unsafe { libc::gettid() })
    }

    /// Lets it go before ordinary threads, if that may be, while `wait` waits for it. A thread that
    /// is urgent anyway stays as it is.
    pub fn hurry<T>(self, priority: i32, wait: impl FnOnce() -> T) -> T {
        let before = Schedule::of(self.0).filter(Schedule::is_ordinary);
        let fifo = Schedule::first_in_first_out(priority);
        let before = before.filter(|_| fifo.set(self.0).is_ok());
        let waited = wait();
        if let Some(before) = before {
            let _ = before.set(self.0);
        }
        waited
    }
}

/// Policy and priority of a thread (sched_setscheduler(2)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Schedule {
    policy: i32,
    priority: i32,
}

impl Schedule {
    /// What a thread starts is ordinary again.
    fn first_in_first_out(priority: i32) -> Self {
        Self { policy: libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK, priority }
    }

    /// That of `thread`; 0 is the calling one.
    fn of(thread: i32) -> Option<Self> {
        let mut param = libc::sched_param { sched_priority: 0 };
        // SAFETY: `param` is writable; a thread that has ended is no error to memory.
        let got = unsafe { libc::sched_getparam(thread, &mut param) };
        // SAFETY: takes a number only.
        let policy = unsafe { libc::sched_getscheduler(thread) };
        let is_known = got == 0 && policy >= 0;
        is_known.then_some(Self { policy, priority: param.sched_priority })
    }

    /// Gives it to `thread`; 0 is the calling one.
    fn set(self, thread: i32) -> Result<()> {
        let param = libc::sched_param { sched_priority: self.priority };
        // SAFETY: `param` is valid for the call; a thread that has ended is no error to memory.
        let done = unsafe { libc::sched_setscheduler(thread, self.policy, &param) };
        check("change the schedule of a thread", done.into()).map(drop)
    }

    fn is_ordinary(&self) -> bool {
        self.policy() == libc::SCHED_OTHER
    }

    /// Without what is only for those it starts.
    fn policy(&self) -> i32 {
        self.policy & !libc::SCHED_RESET_ON_FORK
    }
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
            let policy = || Schedule::of(0).map(|now| now.policy());
            let urgent = Urgent::begin(1);
            let (begun, during) = (urgent.is_some(), policy());
            drop(urgent);
            let after = policy();
            // The heart's priority is not lowered.
            let heart = schedule_fifo(10).is_ok();
            let _urgent = Urgent::begin(1);
            (begun, during, after, heart, Schedule::of(0))
        });
        let (begun, during, after, heart, last) = policies.join().unwrap();
        assert_eq!(during == Some(libc::SCHED_FIFO), begun);
        assert_eq!((after, begun), (Some(libc::SCHED_OTHER), heart));
        assert_eq!(last.is_some_and(|last| last.priority == 10), heart);
    }

    #[test]
    fn a_thread_is_hurried_while_somebody_waits_for_it() {
        let (tell, told) = std::sync::mpsc::channel();
        let (ask, asked) = std::sync::mpsc::channel::<()>();
        let (answer, answers) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            tell.send(Hurried::this()).unwrap();
            for () in asked {
                let policy = Schedule::of(0).map(|now| now.policy());
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
