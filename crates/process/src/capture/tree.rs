//! The process tree of a stopped guest.

use std::collections::BTreeMap;

use hotspare_image::Checkpoint;
use hotspare_image::memory::MmId;
use hotspare_image::tree::{
    ClockReading, GuestPid, LiveProcess, Process as ProcessImage, ProcessState,
    Thread as ThreadImage,
};
use hotspare_kernel::marks::Seen;
use hotspare_kernel::remote::SLOTS;
use hotspare_kernel::thread_info::{self, Status};
use hotspare_kernel::{HostPid, KernelError};
use nix::time::{ClockId, clock_gettime};

use super::mappings::FlagsRead;
use super::{CheckpointRules, asleep, processes};
use crate::guest::{Guest, Held, Thread};
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
        let tids = self.leader_first(pid)?;
        let seen = self.seen.remove(&pid);
        let before = self.outside_before(pid, seen.as_ref())?;
        let mut sorted = self.sort(&tids, seen.as_ref());
        let questions = match before {
            Some(_) => None,
            None => self.questions(pid, &sorted.lively)?,
        };
        let is_new = before.is_none();
        let answered = questions.is_some() || sorted.lively.is_empty();
        if let Some(questions) = &questions {
            sorted.wake(questions.tid);
        }
        let mut waves = sorted.awake.chunks(SLOTS);
        let first = waves.next().map(|tids| self.begin_wave(pid, tids, questions.as_ref()));
        let first = first.transpose()?;
        // While they answer. Whatever comes of it, they have to be put back.
        let outside = before.map_or_else(|| self.look_from_outside(pid), Ok);
        let images = self.look_at_sleepers(&sorted.asleep);
        let first = first.map(|wave| self.end_wave(pid, wave, questions.as_ref()));
        let (outside, mut images) = (outside?, images?);
        let status = &outside.status;
        if let Some(answered) = first.transpose()? {
            self.describe_wave(status, answered, &mut images)?;
        }
        let asleep = sorted.asleep.iter();
        let unknown: Vec<_> = asleep.filter(|tid| !images.contains_key(tid)).copied().collect();
        for tids in waves.chain(unknown.chunks(SLOTS)) {
            let wave = self.begin_wave(pid, tids, questions.as_ref())?;
            let answered = self.end_wave(pid, wave, questions.as_ref())?;
            self.describe_wave(status, answered, &mut images)?;
        }
        if let Some(seen) = &seen {
            self.note_known(seen, images.iter());
        }
        for tid in sorted.known {
            images.extend(self.describe_known(tid, seen.as_ref())?.map(|image| (tid, image)));
        }
        let process = self.processes.get_mut(&pid).ok_or(KernelError::Died(pid))?;
        if is_new {
            process.cache.note_known(pid, seen.as_ref().filter(|_| answered), &outside);
        }
        self.put_together(pid, outside, tids.iter().filter_map(|tid| images.remove(tid)))
    }

    /// What was seen of a process from outside, if it must be as it was: then it has nothing to
    /// answer either.
    fn outside_before(
        &mut self,
        pid: HostPid,
        seen: Option<&Seen>,
    ) -> ObjectResult<Option<Outside>> {
        let process = self.processes.get_mut(&pid).ok_or(KernelError::Died(pid))?;
        let answers = process.cache.answers.as_ref();
        if !answers.is_some_and(processes::Answers::last) {
            return Ok(None);
        }
        process.cache.known(pid, seen)
    }

    fn sort(&mut self, tids: &[HostPid], seen: Option<&Seen>) -> Sorted {
        let mut sorted = Sorted::default();
        for tid in tids.iter().copied() {
            let is_known = self.is_known(tid, seen);
            let is_asleep = self.threads.get_mut(&tid).is_some_and(Thread::is_asleep);
            if !is_asleep {
                sorted.lively.push(tid);
            }
            match (is_known, is_asleep) {
                (true, _) => sorted.known.push(tid),
                (false, true) => sorted.asleep.push(tid),
                (false, false) => sorted.awake.push(tid),
            }
        }
        sorted
    }

    fn put_together(
        &mut self,
        pid: HostPid,
        outside: Outside,
        threads: impl Iterator<Item = ThreadImage>,
    ) -> ObjectResult<ProcessImage> {
        let Outside { status, mut live, exit_signal } = outside;
        live.job_stopped = self.job_stop(pid);
        live.pending = processes::pending(pid, &status)?;
        live.threads = threads.collect();
        let process = self.processes.get_mut(&pid).ok_or(KernelError::Died(pid))?;
        live.mm = process.space.as_ref().map_or(MmId(0), |space| space.id);
        if let Some(answers) = process.cache.answers.clone() {
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

    /// What can be seen of a process.
    fn look_from_outside(&mut self, pid: HostPid) -> ObjectResult<Outside> {
        let status = match self.threads.get_mut(&pid) {
            Some(leader) => thread_info::status_of(pid, &mut leader.status)?,
            None => thread_info::status(pid)?,
        };
        let process = self.processes.get_mut(&pid).ok_or(KernelError::Died(pid))?;
        let cache = &mut process.cache;
        let live = processes::outside(pid, &status, &mut cache.oom_score)?;
        if cache.exe.is_none() {
            cache.layout = processes::layout(pid)?;
        }
        let exit_signal = match cache.exit_signal {
            Some((signal, parent)) if parent == status.parent => signal,
            _ => thread_info::stat(pid)?.get(34).map_or(libc::SIGCHLD, |signal| *signal as i32),
        };
        cache.exit_signal = Some((exit_signal, status.parent));
        let confined = (status.no_new_privs, status.seccomp, status.seccomp_filters);
        if cache.confined.replace(confined) != Some(confined) {
            let threads = self.threads.values_mut().filter(|thread| thread.process == pid);
            threads.for_each(|thread| thread.asleep = None);
        }
        Ok(Outside { status, live, exit_signal })
    }

    /// Describes threads that are asleep. Those to which something may have been done that is not
    /// seen are left out.
    fn look_at_sleepers(
        &mut self,
        asleep: &[HostPid],
    ) -> ObjectResult<BTreeMap<HostPid, ThreadImage>> {
        let mut images = BTreeMap::new();
        for tid in asleep {
            if let Some(thread) = self.threads.get_mut(tid)
                && let Some(image) = asleep::describe(thread)?
            {
                images.insert(*tid, image);
            }
        }
        Ok(images)
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

    fn leader_first(&self, pid: HostPid) -> ObjectResult<Vec<HostPid>> {
        let threads = self.threads.values().filter(|thread| thread.process == pid);
        let mut tids: Vec<HostPid> = threads.map(|thread| thread.tid).collect();
        tids.sort_by_key(|tid| (*tid != pid, *tid));
        if tids.first() == Some(&pid) {
            return Ok(tids);
        }
        let what = format!("process {pid}");
        Err(ObjectError::refused(what, "its first thread has ended before the others"))
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

/// Threads of a stopped process, by how they come to be described.
#[derive(Default)]
struct Sorted {
    /// By their marks.
    known: Vec<HostPid>,
    /// They have executed nothing.
    asleep: Vec<HostPid>,
    /// They answer for themselves.
    awake: Vec<HostPid>,
    /// All that may have executed something.
    lively: Vec<HostPid>,
}

impl Sorted {
    /// One is to answer for its process.
    fn wake(&mut self, tid: HostPid) {
        for quiet in [&mut self.asleep, &mut self.known] {
            let at = quiet.iter().position(|one| *one == tid);
            self.awake.extend(at.map(|at| quiet.remove(at)));
        }
    }
}

/// What can be seen of a process from outside.
#[derive(Clone, Debug)]
pub(super) struct Outside {
    pub(super) status: Status,
    pub(super) live: LiveProcess,
    pub(super) exit_signal: i32,
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
        // The processor time that this takes is a share for all of them.
        let when = match self.held {
            true => FlagsRead::Now,
            false => FlagsRead::Sparingly { processes: self.processes.len() as u32 },
        };
        for process in self.processes.values_mut() {
            let Some(space) = &process.space else { continue };
            let mut captured = checkpoint.spaces.iter_mut();
            let Some(captured) = captured.find(|one| one.id == space.id) else { continue };
            if let Err(error) = process.cache.refresh_flags(process.pid, captured, when) {
                tracing::debug!(%error, pid = %process.pid, "flags of mappings not read");
            }
        }
    }
}
