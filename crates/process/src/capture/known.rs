//! Threads and processes of which the kernel notes what it noted at the last checkpoint
//! ([`hotspare_kernel::marks`]): nobody asks them anything. Registers and signal mask of a thread
//! that has executed something are read, everything else is as it was.
//!
//! A mark is looked at when all threads stand still, before anything is done to them, and kept
//! only with what was found out at the same stop.

use hotspare_image::tree::{QueuedSignal, Thread as ThreadImage};
use hotspare_kernel::marks::{Marks, Seen, ThreadMark};
use hotspare_kernel::{HostPid, ptrace};

use super::asleep::{self, Asleep};
use super::threads::{self, note_restart};
use super::tree::Outside;
use super::{ProcessCache, processes};
use crate::guest::{Guest, Held, Thread, restart_of};
use crate::objects::error::ObjectResult;

/// A thread as it was last described, and its mark then.
#[derive(Debug)]
pub(crate) struct KnownThread {
    mark: Vec<u8>,
    image: Box<ThreadImage>,
}

/// The same of a process, as far as it can be seen from outside.
#[derive(Debug)]
pub(crate) struct KnownProcess {
    mark: Mark,
    outside: Outside,
}

/// Of a process and of its first thread, whose status it shares.
type Mark = (Vec<u8>, Vec<u8>);

/// Loads what marks are looked at with, if this kernel lets us; it takes tens of milliseconds and
/// is done once. A guest is captured without it as well, in longer pauses. Says what is missing.
pub fn prepare_marks() -> Option<String> {
    let (what, error) = match Marks::load() {
        Ok(marks) => ("sockets", marks.sockets.as_ref().err()?.to_string()),
        Err(error) => ("threads and sockets", error.to_string()),
    };
    let missing = format!("changes of {what} cannot be looked up, so pauses are longer: {error}");
    tracing::info!("{missing}");
    Some(missing)
}

impl Guest {
    /// Looks at the marks of all processes; all threads have just been stopped.
    pub(super) fn look_at_marks(&mut self) {
        self.seen.clear();
        let Some(marks) = Marks::loaded() else { return };
        for process in self.processes.values_mut() {
            let Some(space) = &mut process.space else { continue };
            if process.cache.watched.is_none() {
                process.cache.watched = Some(marks.threads.watch(&*process.pidfd).ok());
            }
            let Some(Some(watched)) = &process.cache.watched else { continue };
            match marks.threads.look(watched, &mut self.marks_text) {
                Ok(seen) => {
                    space.mappings_now = Some(seen.mappings);
                    self.seen.insert(process.pid, seen);
                }
                Err(error) => {
                    tracing::debug!(%error, pid = %process.pid, "marks cannot be looked at");
                    process.cache.watched = Some(None);
                }
            }
        }
    }

    /// Forgets what threads and processes were found to be: the next look asks them all.
    pub fn forget_answers(&mut self) {
        for thread in self.threads.values_mut() {
            (thread.known, thread.asleep) = (None, None);
        }
        for process in self.processes.values_mut() {
            (process.cache.known, process.cache.answers) = (None, None);
        }
    }

    /// Threads that can be described by [`Guest::describe_known`].
    pub(super) fn is_known(&self, tid: HostPid, seen: Option<&Seen>) -> bool {
        let mark = seen.and_then(|seen| seen.threads.get(&tid)?.bytes.as_ref());
        let known = self.threads.get(&tid).and_then(|thread| thread.known.as_ref());
        known.is_some_and(|known| Some(&known.mark) == mark)
    }

    /// Describes a thread whose mark is the same.
    pub(super) fn describe_known(
        &mut self,
        tid: HostPid,
        seen: Option<&Seen>,
    ) -> ObjectResult<Option<ThreadImage>> {
        let Some(thread) = self.threads.get_mut(&tid) else { return Ok(None) };
        let Some(mark) = seen.and_then(|seen| seen.threads.get(&tid)) else { return Ok(None) };
        let Some(mut known) = thread.known.take() else { return Ok(None) };
        let slept = thread.is_asleep();
        if !slept {
            look_at_registers(thread, &mut known.image)?;
        }
        let image = &mut known.image;
        let registers = if slept { thread.stopped } else { image.registers };
        image.registers = registers;
        image.restart = note_restart(thread, &registers).or_else(|| restart_of(thread, &registers));
        image.pending = pending(thread, mark)?;
        if !slept && let Some(lulled) = asleep::lull(thread, &registers) {
            if lulled != registers {
                ptrace::set_registers(tid, &lulled)?;
            }
            thread.asleep = Some(Asleep::new(lulled, image));
        }
        let image = (**image).clone();
        thread.known = Some(known);
        Ok(Some(image))
    }

    /// Keeps what was found out about threads, with the marks of this stop.
    pub(super) fn note_known<'a>(
        &mut self,
        seen: &Seen,
        found: impl Iterator<Item = (&'a HostPid, &'a ThreadImage)>,
    ) {
        for (tid, image) in found {
            let Some(thread) = self.threads.get_mut(tid) else { continue };
            let mark = seen.threads.get(tid).and_then(|mark| mark.bytes.clone());
            thread.known = mark.map(|mark| KnownThread { mark, image: Box::new(image.clone()) });
        }
    }
}

fn look_at_registers(thread: &Thread, image: &mut ThreadImage) -> ObjectResult<()> {
    let tid = thread.tid;
    ptrace::extended_registers(tid, &mut image.extended)?;
    image.rseq = ptrace::rseq(tid)?;
    let led_out = threads::leave_critical_section(tid, image.rseq[0])?;
    let stands = matches!(thread.held, Some(Held::Trap | Held::Signal { .. })) && !led_out;
    image.registers = if stands { thread.stopped } else { ptrace::registers(tid)? };
    image.signal_mask = ptrace::signal_mask(tid)?;
    Ok(())
}

fn pending(thread: &Thread, mark: &ThreadMark) -> ObjectResult<Vec<QueuedSignal>> {
    let delivered = threads::about_to_be_delivered(thread);
    let queued = if mark.pending[0] == 0 { Vec::new() } else { threads::queued(thread)? };
    Ok(delivered.into_iter().chain(queued).collect())
}

impl ProcessCache {
    /// What was seen of the process from outside, if that must be as it was.
    pub(super) fn known(
        &mut self,
        pid: HostPid,
        seen: Option<&Seen>,
    ) -> ObjectResult<Option<Outside>> {
        let Some(known) = &mut self.known else { return Ok(None) };
        let Some((first, mark)) = seen.and_then(|seen| mark_with_first(seen, pid)) else {
            return Ok(None);
        };
        if known.mark != mark {
            return Ok(None);
        }
        known.outside.status.pending = first.pending;
        // Whoever renames a directory changes what a process in it has.
        known.outside.live.cwd = processes::link(pid, "cwd")?;
        known.outside.live.root = processes::link(pid, "root")?;
        Ok(Some(known.outside.clone()))
    }

    /// Keeps what was seen from outside, with the marks of this stop; without, it is forgotten.
    pub(super) fn note_known(&mut self, pid: HostPid, seen: Option<&Seen>, outside: &Outside) {
        let mark = seen.and_then(|seen| mark_with_first(seen, pid)).map(|(_, mark)| mark);
        self.known = mark.map(|mark| KnownProcess { mark, outside: outside.clone() });
    }
}

fn mark_with_first(seen: &Seen, pid: HostPid) -> Option<(&ThreadMark, Mark)> {
    let first = seen.threads.get(&pid)?;
    Some((first, (seen.process.clone(), first.bytes.clone()?)))
}
