//! Threads that have executed nothing since they were last looked at.
//!
//! Most threads of a server sleep in a system call from one checkpoint to the next, and to let each
//! of them answer for itself costs more than anything else at a stop. One that has executed nothing
//! is what it was, except for what others can do to it; and that is seen from outside.
//!
//! That it has executed nothing is told by its registers. A thread found in a call that begins
//! again by itself gets a mark in its flags that no computation leaves there
//! ([`crate::guest::waits`]): the call keeps the flags, and programs take them as spoilt by it. A
//! signal handler would give them back, so a thread that is sent a signal is looked at anew; every
//! signal passes by us. Others can change its name, scheduling and pending signals, which are read
//! each time; and seccomp filters (`SECCOMP_FILTER_FLAG_TSYNC`), which show in the first thread as
//! well. (Whoever writes to the timerslack_ns of another's thread in /proc is not seen until that
//! thread runs.)

use hotspare_image::tree::Thread as ThreadImage;
use hotspare_kernel::ptrace::{Registers, reg};
use hotspare_kernel::thread_info;

use super::threads::{self, note_restart};
use crate::guest::{Held, Thread, restart_of, waits};
use crate::objects::error::ObjectResult;

/// What is known of a sleeping thread.
#[derive(Debug)]
pub(crate) struct Asleep {
    /// As it was put back.
    registers: Registers,
    image: Box<ThreadImage>,
}

/// Results of system calls that begin again by themselves (linux/errno.h).
const BEGINS_AGAIN: [i64; 4] = [-512, -513, -514, -516];

/// The registers with which a stopped thread is put back, so that it is known again if it executes
/// nothing; `None` where it is about to.
pub(crate) fn lull(thread: &Thread, registers: &Registers) -> Option<Registers> {
    if !matches!(thread.held, Some(Held::Trap)) {
        return None;
    }
    let in_call = registers[reg::ORIG_RAX] as i64 >= 0
        && BEGINS_AGAIN.contains(&(registers[reg::RAX] as i64));
    // A wait that was put back has its mark already.
    let waits_again = restart_of(thread, registers).is_some();
    (in_call || waits_again).then(|| waits::marked(*registers))
}

impl Asleep {
    /// A thread that is put back with these registers and has just been described.
    pub(crate) fn new(registers: Registers, image: &ThreadImage) -> Self {
        Self { registers, image: Box::new(image.clone()) }
    }

    /// At each system call R11 takes the flags.
    fn is(&self, registers: &Registers) -> bool {
        let same = |index: usize| index == reg::R11 || self.registers[index] == registers[index];
        (0..registers.len()).all(same)
    }
}

impl Thread {
    /// Whether it has executed nothing since it was last described. It must be stopped.
    pub(super) fn is_asleep(&mut self) -> bool {
        let held = matches!(self.held, Some(Held::Trap));
        // What is known of one that is awake must not count again once it is put back.
        self.asleep = self.asleep.take().filter(|asleep| held && asleep.is(&self.stopped));
        self.asleep.is_some()
    }
}

/// Describes a stopped thread that is asleep.
pub(super) fn describe(thread: &mut Thread) -> ObjectResult<Option<ThreadImage>> {
    let Some(asleep) = &thread.asleep else { return Ok(None) };
    let (mut image, registers) = ((*asleep.image).clone(), thread.stopped);
    image.registers = registers;
    image.restart = note_restart(thread, &registers).or_else(|| restart_of(thread, &registers));
    image.pending = threads::queued(thread)?;
    image.name = thread_info::name_of(thread.tid, &mut thread.name)?;
    (image.scheduling, image.io_priority) = threads::scheduling(thread.tid)?;
    Ok(Some(image))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_call_spoils_may_differ() {
        let mut registers: Registers = [7; 27];
        let asleep = Asleep { registers, image: Box::default() };
        registers[reg::R11] = 8;
        assert!(asleep.is(&registers));
        registers[reg::RCX] = 8;
        assert!(!asleep.is(&registers));
    }
}
