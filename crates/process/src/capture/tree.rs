//! The process tree of a stopped guest.

use std::collections::BTreeMap;

use hotspare_image::Checkpoint;
use hotspare_image::memory::MmId;
use hotspare_image::tree::{
    ClockReading, GuestPid, Process as ProcessImage, ProcessState, Thread as ThreadImage,
};
use hotspare_kernel::remote::{Call, SLOTS, Stub};
use hotspare_kernel::thread_info::{self, Status};
use hotspare_kernel::{HostPid, KernelError};
use nix::time::{ClockId, clock_gettime};

use super::CheckpointRules;
use super::processes::{self, Answers as ProcessAnswers, TimerLine};
use super::threads::{self, Answers, Visit};
use crate::guest::{Guest, Held};
use crate::objects::error::{ObjectError, ObjectResult};

/// Our init: parent of what has no other.
const INIT: GuestPid = GuestPid(1);

impl Guest {
    /// A stopped thread of `pid` that can be led off its road.
    pub(crate) fn visitable_thread(&self, pid: HostPid) -> ObjectResult<HostPid> {
        let mut all = self.threads.range(pid..).chain(self.threads.range(..pid));
        all.find(|(_, thread)| {
            thread.process == pid && matches!(thread.held, Some(Held::Trap | Held::Signal { .. }))
        })
        .map(|(tid, _)| *tid)
        .ok_or_else(|| {
            ObjectError::transient(format!("process {pid}"), "stopped by job control, or ending")
        })
    }

    /// Captures processes and threads of the stopped guest.
    pub(crate) fn capture_tree(&mut self) -> ObjectResult<Checkpoint> {
        let mut processes = Vec::with_capacity(self.processes.len());
        for pid in self.processes().collect::<Vec<_>>() {
            processes.push(self.capture_process(pid)?);
        }
        processes.extend(self.zombies());
        let names = nix::sys::utsname::uname()
            .map_err(|errno| KernelError::from_errno("read host name", errno as i32))?;
        let text = |name: &std::ffi::OsStr| name.to_string_lossy().into_owned();
        Ok(Checkpoint {
            processes: parents_first(processes),
            clocks: clocks()?,
            names: (text(names.nodename()), text(names.domainname())),
            ..Checkpoint::default()
        })
    }

    fn capture_process(&mut self, pid: HostPid) -> ObjectResult<ProcessImage> {
        let status = match self.threads.get_mut(&pid) {
            Some(leader) => thread_info::status_of(pid, &mut leader.status)?,
            None => thread_info::status(pid)?,
        };
        let process = self.processes.get_mut(&pid).ok_or(KernelError::Died(pid))?;
        let cache = &mut process.cache;
        let mut live = processes::outside(pid, &status, &mut cache.oom_score)?;
        if cache.exe.is_none() {
            cache.layout = processes::layout(pid)?;
        }
        let exit_signal = match cache.exit_signal {
            Some((signal, parent)) if parent == status.parent => signal,
            _ => thread_info::stat(pid)?.get(34).map_or(libc::SIGCHLD, |signal| *signal as i32),
        };
        cache.exit_signal = Some((exit_signal, status.parent));
        live.mm = process.space.as_ref().map_or(MmId(0), |space| space.id);
        live.job_stopped = self.job_stop(pid);
        live.threads = self.capture_threads(pid, &status)?;
        if let Some(process) = self.processes.get_mut(&pid)
            && let Some(answers) = process.cache.answers.clone()
        {
            answers.describe(&mut live, &mut process.cache.layout);
        }
        Ok(ProcessImage {
            pid: GuestPid(status.inner[0]),
            parent: self.guest_parent(status.parent),
            group: GuestPid(status.inner[1]),
            session: GuestPid(status.inner[2]),
            state: ProcessState::Alive(Box::new(live)),
            exit_signal,
        })
    }

    fn job_stop(&self, pid: HostPid) -> Option<i32> {
        self.threads.values().filter(|thread| thread.process == pid).find_map(|thread| match thread
            .held
        {
            Some(Held::Group(signal)) => Some(signal),
            _ => None,
        })
    }

    fn guest_parent(&self, host: i32) -> GuestPid {
        self.processes.get(&HostPid(host)).map_or(INIT, |process| process.guest_pid)
    }

    /// What to ask a process about itself, and which of its threads: the first that can be
    /// visited. None if all are stopped by job control: then nothing can have changed since it
    /// last answered.
    fn questions(&mut self, pid: HostPid) -> ObjectResult<Option<Questions>> {
        let visitable = self.visitable_thread(pid);
        let process = self.processes.get_mut(&pid).ok_or(KernelError::Died(pid))?;
        let tid = match visitable {
            Ok(tid) => tid,
            Err(error) if process.cache.answers.is_none() => return Err(error),
            Err(_) => return Ok(None),
        };
        let timers = processes::posix_timers(pid, &mut process.cache.timers)?;
        if timers.len() <= TIMERS_TOGETHER {
            return Ok(Some(Questions { tid, timers }));
        }
        if let Some(stub) = &process.stub {
            process.cache.answers = Some(ask_one(stub, tid, &timers)?);
        }
        Ok(None)
    }

    fn capture_threads(&mut self, pid: HostPid, leader: &Status) -> ObjectResult<Vec<ThreadImage>> {
        let mut tids: Vec<HostPid> = self.threads_of(pid);
        // The leader first.
        tids.sort_by_key(|tid| (*tid != pid, *tid));
        if tids.first() != Some(&pid) {
            let what = format!("process {pid}");
            return Err(ObjectError::refused(what, "its first thread has ended before the others"));
        }
        let questions = self.questions(pid)?;
        let mut images = Vec::with_capacity(tids.len());
        for wave in tids.chunks(SLOTS) {
            self.capture_wave((pid, leader), wave, questions.as_ref(), &mut images)?;
        }
        Ok(images)
    }

    fn threads_of(&self, pid: HostPid) -> Vec<HostPid> {
        let threads = self.threads.values();
        threads.filter(|thread| thread.process == pid).map(|thread| thread.tid).collect()
    }

    /// Captures up to [`SLOTS`] threads side by side.
    fn capture_wave(
        &mut self,
        (pid, leader): (HostPid, &Status),
        wave: &[HostPid],
        questions: Option<&Questions>,
        images: &mut Vec<ThreadImage>,
    ) -> ObjectResult<()> {
        let mut visits = Vec::with_capacity(wave.len());
        for tid in wave {
            let stopped = matches!(self.threads[tid].held, Some(Held::Group(_)));
            match Visit::begin(*tid, stopped) {
                Ok(visit) => visits.push(visit),
                Err(error) => {
                    put_back(&mut visits);
                    return Err(error);
                }
            }
        }
        let process = self.processes.get_mut(&pid);
        let Some((stub, cache)) = process.and_then(|p| Some((p.stub.as_ref()?, &mut p.cache)))
        else {
            put_back(&mut visits);
            return Err(ObjectError::transient(format!("process {pid}"), "it has no stub yet"));
        };
        let answers = ask_wave(stub, wave, &visits, questions);
        put_back(&mut visits);
        let (answers, of_process) = answers?;
        cache.answers = of_process.or(cache.answers.take());
        for ((tid, visit), answers) in wave.iter().zip(visits).zip(answers) {
            let Some(thread) = self.threads.get_mut(tid) else { continue };
            let own;
            let status = if *tid == pid {
                leader
            } else {
                own = thread_info::status_of(*tid, &mut thread.status)?;
                &own
            };
            thread.answers = answers.or(thread.answers);
            let known = thread.answers.ok_or_else(|| {
                ObjectError::transient(format!("thread {tid}"), "stopped by job control")
            })?;
            images.push(visit.describe(thread, status, &known)?);
        }
        Ok(())
    }

    /// Ended children that their parents have not waited for.
    fn zombies(&mut self) -> Vec<ProcessImage> {
        let mut found = Vec::new();
        let mut gone = Vec::new();
        for (pid, ended) in &self.ended {
            match thread_info::status(*pid) {
                Ok(status) if status.state == b'Z' && self.has_parent(&status) => {
                    found.push(zombie(&status, ended.status, self.guest_parent(status.parent)));
                }
                Ok(_) | Err(_) => gone.push(*pid),
            }
        }
        for pid in gone {
            self.ended.remove(&pid);
        }
        found
    }

    fn has_parent(&self, status: &Status) -> bool {
        self.processes.contains_key(&HostPid(status.parent))
    }
}

fn zombie(status: &Status, wait_status: i32, parent: GuestPid) -> ProcessImage {
    ProcessImage {
        pid: GuestPid(status.inner[0]),
        parent,
        group: GuestPid(status.inner[1]),
        session: GuestPid(status.inner[2]),
        state: ProcessState::Zombie {
            wait_status,
            name: String::from_utf8_lossy(&status.name).into_owned(),
        },
        exit_signal: libc::SIGCHLD,
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
    for batch in calls.chunks_mut(hotspare_kernel::remote::CALLS_MAX) {
        stub.run(tid, 0, batch)?;
    }
    ProcessAnswers::read(&calls, timers, stub, Stub::scratch_offset(0))
}

/// What a process is asked together with one of its threads.
struct Questions {
    tid: HostPid,
    timers: Vec<TimerLine>,
}

/// With more POSIX timers a process is asked apart from its thread.
const TIMERS_TOGETHER: usize = 80;

type WaveAnswers = (Vec<Option<Answers>>, Option<ProcessAnswers>);

/// Lets all visited threads answer at the same time, and one of them for the process.
fn ask_wave(
    stub: &Stub,
    wave: &[HostPid],
    visits: &[Visit],
    questions: Option<&Questions>,
) -> ObjectResult<WaveAnswers> {
    const BESIDE: usize = threads::SCRATCH as usize;
    let mut asked: BTreeMap<usize, Vec<Call>> = BTreeMap::new();
    for (slot, (tid, visit)) in wave.iter().zip(visits).enumerate() {
        if let Some(detour) = &visit.detour {
            let mut calls = threads::ask(stub.scratch(slot)).to_vec();
            if let Some(questions) = questions.filter(|questions| questions.tid == *tid) {
                let scratch = stub.scratch(slot) + threads::SCRATCH;
                calls.extend(processes::ask(scratch, stub.probe_page(), &questions.timers));
            }
            stub.start(*tid, slot, detour.registers(), &calls)?;
            asked.insert(slot, calls);
        }
    }
    let mut answers = vec![None; wave.len()];
    let mut of_process = None;
    for (slot, mut calls) in asked {
        stub.finish(wave[slot], slot, &mut calls)?;
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

/// Orders processes so that a parent comes before its children.
fn parents_first(processes: Vec<ProcessImage>) -> Vec<ProcessImage> {
    let mut left: BTreeMap<GuestPid, Vec<ProcessImage>> = BTreeMap::new();
    for process in processes {
        left.entry(process.parent).or_default().push(process);
    }
    let mut ordered = Vec::new();
    let mut next = vec![INIT];
    while let Some(parent) = next.pop() {
        for process in left.remove(&parent).unwrap_or_default() {
            next.push(process.pid);
            ordered.push(process);
        }
    }
    ordered
}

/// The clocks of the guest's time namespace are those of the host plus an offset that the owner
/// of the guest knows and adds.
fn clocks() -> ObjectResult<ClockReading> {
    let read = |clock| {
        clock_gettime(clock)
            .map(|time| time.tv_sec() as u64 * 1_000_000_000 + time.tv_nsec() as u64)
            .map_err(|errno| KernelError::from_errno("read clock", errno as i32))
    };
    Ok(ClockReading {
        realtime_ns: read(ClockId::CLOCK_REALTIME)?,
        monotonic_ns: read(ClockId::CLOCK_MONOTONIC)?,
        boottime_ns: read(ClockId::CLOCK_BOOTTIME)?,
    })
}

impl Guest {
    /// Hands the stopped guest to the keeper of descriptors.
    pub(crate) fn capture_objects(
        &mut self,
        rules: &mut CheckpointRules<'_>,
        checkpoint: &mut Checkpoint,
    ) -> ObjectResult<()> {
        let mut shared = std::mem::take(&mut self.shared);
        let taken = rules.objects.take(self, &mut shared, checkpoint);
        self.shared = shared;
        taken
    }

    /// Reads the flags of mappings again and enters them into a checkpoint that has just been
    /// taken; to be called when the guest runs, or is held for good and nothing may be late any
    /// more. Where that fails, they stay as they were last.
    pub fn refresh_flags(&mut self, checkpoint: &mut Checkpoint) {
        for process in self.processes.values_mut() {
            let Some(space) = &process.space else { continue };
            let mut captured = checkpoint.spaces.iter_mut();
            let Some(captured) = captured.find(|one| one.id == space.id) else { continue };
            if let Err(error) = process.cache.refresh_flags(process.pid, captured, self.held) {
                tracing::debug!(%error, pid = %process.pid, "flags of mappings not read");
            }
        }
    }
}
