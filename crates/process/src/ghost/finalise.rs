//! The last steps before the ghost runs. Their order is the hard part:
//!
//! 1. what needs our tools in the ghost: descriptors, calls on them;
//! 2. what needs privilege: attributes, scheduling, filters, credentials;
//! 3. what starts to run or to wait at once: signals, timers, rseq, restart blocks;
//! 4. what the calls themselves stand on: limits, the stub, registers.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use hotspare_image::Checkpoint;
use hotspare_image::tree::{GuestPid, LiveProcess, Thread};
use hotspare_kernel::ptrace::Registers;

use super::error::{GhostError, GhostResult};
use super::{Ghost, RestoredFiles, RunningThread, living, space};
use crate::objects::remote_step::RemoteStep;

/// A ghost whose threads need only be let go.
#[derive(Debug)]
pub struct Finalised {
    pub(super) threads: Vec<RunningThread>,
    pub(super) stopped: Vec<GuestPid>,
    /// How long each part took.
    pub parts: Vec<(&'static str, Duration)>,
}

/// Measures parts of a journey.
struct Clock {
    last: Instant,
    parts: Vec<(&'static str, Duration)>,
}

impl Clock {
    fn part(&mut self, name: &'static str) {
        let now = Instant::now();
        self.parts.push((name, now - self.last));
        self.last = now;
    }
}

/// Longest wait for the ghost's clock; far more than it can drift between two full transfers.
const CLOCK_WAIT_MAX: Duration = Duration::from_secs(10);

/// What a thread is resumed with.
struct Last<'a> {
    thread: &'a Thread,
    registers: Registers,
}

impl Ghost {
    /// Puts in everything that was left for last. `files` are the checkpoint's open files, made
    /// in this process, `steps` what remains to be done from inside, in this order; see
    /// [`crate::objects::restore`]. `files` can be closed afterwards.
    ///
    /// After a failure the ghost cannot be used any more.
    pub fn finalise(
        &mut self,
        files: &RestoredFiles,
        steps: &[RemoteStep],
    ) -> GhostResult<Finalised> {
        let image = self
            .image
            .take()
            .ok_or_else(|| GhostError::Image("no checkpoint has been applied".into()))?;
        let finalised = self.finalise_as(&image, files, steps);
        self.image = Some(image);
        finalised
    }

    fn finalise_as(
        &mut self,
        image: &Checkpoint,
        files: &RestoredFiles,
        steps: &[RemoteStep],
    ) -> GhostResult<Finalised> {
        let mut clock = Clock { last: Instant::now(), parts: Vec::new() };
        self.init().set_last_pid(image.last_pid)?;
        clock.part("last pid");
        for (pid, live) in living(image) {
            let body = self.body(pid)?;
            body.place_descriptors(&live.descriptors, files).map_err(GhostError::at(pid))?;
        }
        for steps in steps.chunk_by(|one, next| one.process() == next.process()) {
            let pid = steps[0].process();
            let steps: Vec<&RemoteStep> = steps.iter().collect();
            self.body(pid)?.take_steps(&steps).map_err(GhostError::at(pid))?;
        }
        clock.part("descriptors");
        self.use_ipc(image)?;
        clock.part("ipc");
        for (pid, live) in living(image) {
            let layout = &space(image, live.mm)?.layout;
            self.dress(pid, live, layout).map_err(GhostError::at(pid))?;
        }
        clock.part("attributes");
        // Before sleeps are begun again for the rest of their time: they would end early by this.
        self.await_clock(image);
        clock.part("clock");
        // A parent hears of a child that stops; what it is to hear is put in afterwards.
        let mut last = BTreeMap::new();
        let mut threads = Vec::new();
        for (pid, live) in living(image).filter(|(_, live)| live.job_stopped.is_some()) {
            let going = self.set_going(pid, live).map_err(GhostError::at(pid))?;
            threads.extend(self.withdraw(pid, live, &going).map_err(GhostError::at(pid))?);
        }
        for (pid, live) in living(image).filter(|(_, live)| live.job_stopped.is_none()) {
            last.insert(pid, self.set_going(pid, live).map_err(GhostError::at(pid))?);
        }
        clock.part("signals and timers");
        for (pid, live) in living(image).filter(|(_, live)| live.job_stopped.is_none()) {
            let last = last.remove(&pid).unwrap_or_default();
            threads.extend(self.withdraw(pid, live, &last).map_err(GhostError::at(pid))?);
        }
        self.sources.seal(&self.namespaces)?;
        clock.part("registers");
        let stopped = living(image).filter(|(_, live)| live.job_stopped.is_some());
        let stopped = stopped.map(|(pid, _)| pid).collect();
        Ok(Finalised { threads, stopped, parts: clock.parts })
    }

    fn body(&self, pid: GuestPid) -> GhostResult<&super::body::Body> {
        self.bodies.get(&pid).ok_or_else(|| GhostError::Image(format!("no process {}", pid.0)))
    }

    fn dress(
        &mut self,
        pid: GuestPid,
        live: &LiveProcess,
        layout: &hotspare_image::memory::Layout,
    ) -> GhostResult<()> {
        let body = self
            .bodies
            .get_mut(&pid)
            .ok_or_else(|| GhostError::Image(format!("no process {}", pid.0)))?;
        body.set_attributes(live)?;
        body.lock_future(layout)?;
        // Another user's limits could not be set without CAP_SYS_RESOURCE.
        body.set_limits(live)?;
        body.dress_fully(&live.threads)?;
        body.set_dumpable(layout)
    }

    /// Signals, timers, rseq and restart blocks of a process.
    fn set_going<'a>(&self, pid: GuestPid, live: &'a LiveProcess) -> GhostResult<Vec<Last<'a>>> {
        let body = self.body(pid)?;
        body.drop_signals()?;
        body.queue_signals(live)?;
        for thread in live.threads.iter().filter(|thread| !thread.pending.is_empty()) {
            body.queue_thread_signals(body.thread(thread.tid)?, live, thread)?;
        }
        body.register_rseq(&live.threads)?;
        body.start_timers(live, self.now())?;
        let mut last = Vec::new();
        for thread in &live.threads {
            let registers = body.final_registers(body.thread(thread.tid)?, thread)?;
            last.push(Last { thread, registers });
        }
        Ok(last)
    }

    /// Takes the stub out and sets the registers.
    fn withdraw(
        &self,
        pid: GuestPid,
        live: &LiveProcess,
        last: &[Last<'_>],
    ) -> GhostResult<Vec<RunningThread>> {
        let body = self.body(pid)?;
        let mut trap: Vec<_> = body.trap_action(live).into_iter().collect();
        body.hands.withdraw(body.host, &mut trap)?;
        if let Some(signal) = live.job_stopped {
            body.stop_as(live, signal)?;
        }
        let mut running = Vec::new();
        for end in last {
            let host = body.thread(end.thread.tid)?;
            body.resume_as(host, end.thread, &end.registers)?;
            running.push(RunningThread { process: pid, tid: end.thread.tid, host });
        }
        Ok(running)
    }

    /// The guest's clocks must not go back. They run since the ghost was made, as far behind the
    /// primary's as the first checkpoint took to get here; if that is further than the last one
    /// is old, wait for the rest.
    fn await_clock(&self, image: &Checkpoint) {
        let behind = image.clocks.monotonic_ns as i64 - self.now().monotonic_ns as i64;
        if behind <= 0 {
            return;
        }
        let behind = Duration::from_nanos(behind as u64);
        if behind > CLOCK_WAIT_MAX {
            // A guest whose clock went back is better than none.
            tracing::error!(?behind, "the guest's clocks go back");
            return;
        }
        std::thread::sleep(behind);
    }
}
