//! Threads that answer for themselves, side by side.

use std::collections::BTreeMap;

use hotspare_image::tree::Thread as ThreadImage;
use hotspare_kernel::remote::{CALLS_MAX, Call, Stub};
use hotspare_kernel::thread_info::{self, Status};
use hotspare_kernel::{HostPid, KernelError};

use super::processes::{self, Answers as ProcessAnswers, TimerLine};
use super::threads::{self, Answers, Visit};
use crate::guest::{Guest, Held};
use crate::objects::error::{ObjectError, ObjectResult};

/// What a process is asked together with one of its threads.
pub(super) struct Questions {
    pub tid: HostPid,
    timers: Vec<TimerLine>,
}

/// With more POSIX timers a process is asked apart from its thread.
const TIMERS_TOGETHER: usize = 80;

/// Threads that are running calls of ours.
pub(super) struct Wave {
    tids: Vec<HostPid>,
    visits: Vec<Visit>,
    /// By slot.
    asked: BTreeMap<usize, Vec<Call>>,
}

/// Threads that have answered, and stand where they stood.
pub(super) struct Answered {
    tids: Vec<HostPid>,
    visits: Vec<Visit>,
    answers: Vec<Option<Answers>>,
}

impl Guest {
    /// What to ask a process about itself, and which of its threads: the first that can be
    /// visited, one that is awake if there is any. None if nothing can have changed since it last
    /// answered: all are stopped by job control, or asleep.
    pub(super) fn questions(
        &mut self,
        pid: HostPid,
        awake: &[HostPid],
    ) -> ObjectResult<Option<Questions>> {
        let answers = |tid: &&HostPid| {
            matches!(self.threads[*tid].held, Some(Held::Trap | Held::Signal { .. }))
        };
        let awake = awake.iter().find(answers).copied();
        let visitable = awake.map_or_else(|| self.visitable_thread(pid), Ok);
        let process = self.processes.get_mut(&pid).ok_or(KernelError::Died(pid))?;
        let tid = match visitable {
            Ok(tid) => tid,
            Err(error) if process.cache.answers.is_none() => return Err(error),
            Err(_) => return Ok(None),
        };
        let timers = processes::posix_timers(pid, &mut process.cache.timers)?;
        let known = process.cache.answers.as_ref();
        if awake.is_none() && timers.is_empty() && known.is_some_and(ProcessAnswers::last) {
            return Ok(None);
        }
        if timers.len() <= TIMERS_TOGETHER {
            return Ok(Some(Questions { tid, timers }));
        }
        if let Some(stub) = &process.stub {
            process.cache.answers = Some(ask_one(stub, tid, &timers)?);
        }
        Ok(None)
    }

    /// Lets up to [`SLOTS`](hotspare_kernel::remote::SLOTS) threads begin to answer, one of them
    /// for the process as well. [`Guest::end_wave`] must follow.
    pub(super) fn begin_wave(
        &mut self,
        pid: HostPid,
        tids: &[HostPid],
        questions: Option<&Questions>,
    ) -> ObjectResult<Wave> {
        // What a process is asked may take mappings of ours.
        if let Some(space) = self.processes.get_mut(&pid).and_then(|one| one.space.as_mut()) {
            space.mappings_now = None;
        }
        let stub = self.processes.get(&pid).and_then(|process| process.stub.as_ref());
        let stub = stub.ok_or_else(|| {
            ObjectError::transient(format!("process {pid}"), "it has no stub yet")
        })?;
        let (tids, visits) = (tids.to_vec(), Vec::with_capacity(tids.len()));
        let mut wave = Wave { tids, visits, asked: BTreeMap::new() };
        match self.start_wave(stub, &mut wave, questions) {
            Ok(()) => Ok(wave),
            Err(error) => {
                drop(wave.await_answers(stub));
                put_back(&mut wave.visits);
                Err(error)
            }
        }
    }

    fn start_wave(
        &self,
        stub: &Stub,
        wave: &mut Wave,
        questions: Option<&Questions>,
    ) -> ObjectResult<()> {
        for tid in &wave.tids {
            wave.visits.push(Visit::begin(&self.threads[tid])?);
        }
        for (slot, (tid, visit)) in wave.tids.iter().zip(&wave.visits).enumerate() {
            let Some(detour) = &visit.detour else { continue };
            let mut calls = threads::ask(stub.scratch(slot)).to_vec();
            if let Some(questions) = questions.filter(|questions| questions.tid == *tid) {
                let scratch = stub.scratch(slot) + threads::SCRATCH;
                calls.extend(processes::ask(scratch, stub.probe_page(), &questions.timers));
            }
            stub.start(*tid, slot, detour.registers(), &calls)?;
            wave.asked.insert(slot, calls);
        }
        Ok(())
    }

    /// Waits for the answers and puts the threads back.
    pub(super) fn end_wave(
        &mut self,
        pid: HostPid,
        mut wave: Wave,
        questions: Option<&Questions>,
    ) -> ObjectResult<Answered> {
        let process = self.processes.get_mut(&pid).ok_or(KernelError::Died(pid))?;
        let Some(stub) = &process.stub else { return Err(KernelError::Died(pid).into()) };
        let read = wave.await_answers(stub).and_then(|()| wave.read(stub, questions));
        put_back(&mut wave.visits);
        let (answers, of_process) = read?;
        process.cache.answers = of_process.or(process.cache.answers.take());
        Ok(Answered { tids: wave.tids, visits: wave.visits, answers })
    }

    /// Describes the threads of a wave; `leader` is the status of the first thread of the process.
    pub(super) fn describe_wave(
        &mut self,
        leader: &Status,
        wave: Answered,
        images: &mut BTreeMap<HostPid, ThreadImage>,
    ) -> ObjectResult<()> {
        for ((tid, visit), answers) in wave.tids.iter().zip(wave.visits).zip(wave.answers) {
            let Some(thread) = self.threads.get_mut(tid) else { continue };
            let own;
            let status = if tid.0 == leader.group {
                leader
            } else {
                own = thread_info::status_of(*tid, &mut thread.status)?;
                &own
            };
            thread.answers = answers.or(thread.answers);
            let known = thread.answers.ok_or_else(|| {
                ObjectError::transient(format!("thread {tid}"), "stopped by job control")
            })?;
            images.insert(*tid, visit.describe(thread, status, &known)?);
        }
        Ok(())
    }
}

type WaveAnswers = (Vec<Option<Answers>>, Option<ProcessAnswers>);

impl Wave {
    fn await_answers(&mut self, stub: &Stub) -> ObjectResult<()> {
        let mut all = Ok(());
        for (slot, calls) in &mut self.asked {
            all = all.and(stub.finish(self.tids[*slot], *slot, calls));
        }
        Ok(all?)
    }

    fn read(&self, stub: &Stub, questions: Option<&Questions>) -> ObjectResult<WaveAnswers> {
        const BESIDE: usize = threads::SCRATCH as usize;
        let mut answers = vec![None; self.tids.len()];
        let mut of_process = None;
        for (&slot, calls) in &self.asked {
            let (own, rest) = calls.split_at(threads::CALLS);
            let scratch = Stub::scratch_offset(slot);
            answers[slot] = Some(Answers::read(own, stub, scratch)?);
            if let Some(questions) = questions.filter(|_| !rest.is_empty()) {
                let timers = &questions.timers;
                of_process = Some(ProcessAnswers::read(rest, timers, stub, scratch + BESIDE)?);
            }
        }
        Ok((answers, of_process))
    }
}

fn put_back(visits: &mut [Visit]) {
    for visit in visits {
        if let Err(error) = visit.put_back() {
            tracing::debug!(%error, "thread did not come back from its detour");
        }
    }
}

fn ask_one(stub: &Stub, tid: HostPid, timers: &[TimerLine]) -> ObjectResult<ProcessAnswers> {
    let mut calls = processes::ask(stub.scratch(0), stub.probe_page(), timers);
    for batch in calls.chunks_mut(CALLS_MAX) {
        stub.run(tid, 0, batch)?;
    }
    ProcessAnswers::read(&calls, timers, stub, Stub::scratch_offset(0))
}
