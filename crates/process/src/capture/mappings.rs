//! From lines of `/proc/PID/maps` to an [`AddressSpace`].

use std::time::{Duration, Instant};

use hotspare_image::memory::mapping_flags as flag;
use hotspare_image::memory::{AddressSpace, Backing, GuestRange, Layout, MappedFile, Mapping};
use hotspare_image::tree::HostPath;
use hotspare_kernel::HostPid;
use hotspare_kernel::kept_file::KeptFile;
use hotspare_kernel::marks::WatchedThreads;
use hotspare_kernel::proc_maps::{self, Flags, MapLine};

use super::known::KnownProcess;
use super::processes::{self, Answers};
use super::shared::SharedTable;
use super::space::{Space, Tracked, is_shared_memory, tracked};
use crate::guest::Process;
use crate::objects::error::{ObjectError, ObjectResult};

/// What is read of a process once and kept until its next execve.
#[derive(Debug)]
pub struct ProcessCache {
    /// `/proc/PID/timers`.
    pub(crate) timers: KeptFile,
    /// `/proc/PID/oom_score_adj`.
    pub(crate) oom_score: KeptFile,
    /// Signal that the parent gets at its end, and the parent. It changes with the parent.
    pub(crate) exit_signal: Option<(i32, i32)>,
    pub(crate) exe: Option<HostPath>,
    pub(crate) layout: Layout,
    pub(crate) answers: Option<Answers>,
    /// Its marks; `Some(None)` where they cannot be looked at.
    pub(crate) watched: Option<Option<WatchedThreads>>,
    /// What it was when it had these marks.
    pub(crate) known: Option<KnownProcess>,
    /// Whether the first thread may gain privileges, its seccomp mode and number of filters.
    pub(crate) confined: Option<(bool, u32, u32)>,
    /// Flags as they were a while ago.
    flags: Vec<Flags>,
    /// Not before then are they read again.
    flags_next: Option<Instant>,
    /// How often what is known of them has changed.
    flags_read: u64,
    /// The mappings as described when mappings, flags and droppable memory were these.
    described: Vec<Mapping>,
    described_of: Option<Described>,
}

/// Changes of lines and flags so far, droppable memory.
type Described = (u64, u64, Vec<(u64, u64)>);

/// How much of the time may go into reading flags, of all processes together: one part in so many.
const FLAGS_SHARE: u32 = 100;

/// When flags are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FlagsRead {
    /// Now: this checkpoint is the last.
    Now,
    /// When it is the turn of the process, which has its part of the time.
    Sparingly {
        /// Of the guest.
        processes: u32,
    },
}

/// Flags that are known from elsewhere, or for good.
const LASTING: u32 = flag::MAIN_STACK | flag::GROWS_DOWN | flag::DROPPABLE;

impl ProcessCache {
    /// Nothing is known yet of process `pid`.
    pub(crate) fn new(pid: HostPid) -> Self {
        Self {
            timers: KeptFile::of(pid, "timers"),
            oom_score: KeptFile::of(pid, "oom_score_adj"),
            exit_signal: None,
            exe: None,
            layout: Layout::default(),
            answers: None,
            watched: None,
            known: None,
            confined: None,
            flags: Vec::new(),
            flags_next: None,
            flags_read: 0,
            described: Vec::new(),
            described_of: None,
        }
    }

    /// Reads again what madvise(2) and mlock(2) leave in no line of maps, and enters it into what
    /// has just been captured. The kernel counts all pages to answer, so this is not for the
    /// pause, nor for every epoch of a large process: what changed between may arrive late, unless
    /// they are read now.
    pub(crate) fn refresh_flags(
        &mut self,
        pid: HostPid,
        captured: &mut AddressSpace,
        when: FlagsRead,
    ) -> ObjectResult<()> {
        let began = Instant::now();
        let processes = match when {
            FlagsRead::Now => 1,
            FlagsRead::Sparingly { processes } => processes.max(1),
        };
        if when == FlagsRead::Now || self.flags_next.is_none_or(|next| next <= began) {
            let used = processor_time();
            self.flags = proc_maps::flags(pid)?;
            self.flags_read += 1;
            let all = (processor_time() - used) * processes;
            self.flags_next = Some(began + all * FLAGS_SHARE);
            self.enter_flags(captured);
        }
        Ok(())
    }

    /// Enters flags that were read after the mappings were described. What was known by then
    /// [`describe`] has entered.
    fn enter_flags(&self, captured: &mut AddressSpace) {
        // Droppable memory is what mmap(2) made it; most advice is refused there.
        let advised = |mapping: &&mut Mapping| mapping.flags & flag::DROPPABLE == 0;
        for mapping in captured.mappings.iter_mut().filter(advised) {
            let known = self.flags_at(mapping.range.start.0);
            if let Some(known) = known.filter(|known| known.end == mapping.range.end.0) {
                mapping.flags = mapping.flags & LASTING | flags_of(known);
                mapping.protection_key = known.protection_key;
            }
        }
    }

    /// What was read of memory that has been mapped anew since then was said of another mapping.
    /// Of the new one only what mlockall(2) with `MCL_FUTURE` makes it is known.
    fn forget_flags(&mut self, fresh: &[GuestRange], lines: &[MapLine]) {
        for range in fresh {
            let from = self.flags.partition_point(|flags| flags.end <= range.start.0);
            let to = self.flags.partition_point(|flags| flags.start < range.end.0);
            let new = lines.iter().filter(|line| {
                self.layout.lock_future && range.start.0 <= line.start && line.end <= range.end.0
            });
            let locked = new.map(|line| Flags {
                start: line.start,
                end: line.end,
                codes: vec![*b"lo"],
                protection_key: 0,
            });
            self.flags.splice(from..to.max(from), locked);
            self.flags_read += 1;
        }
    }

    fn flags_at(&self, start: u64) -> Option<&Flags> {
        let at = self.flags.binary_search_by_key(&start, |flags| flags.start).ok()?;
        self.flags.get(at)
    }
}

/// The address space of a stopped process.
pub fn describe(process: &mut Process, shared: &mut SharedTable) -> ObjectResult<AddressSpace> {
    let pid = process.pid;
    let Some(space) = process.space.as_mut() else {
        return Err(ObjectError::transient(format!("process {pid}"), "it has only just begun"));
    };
    if process.cache.exe.is_none() {
        process.cache.exe = Some(processes::link(pid, "exe")?);
    }
    let cache = &mut process.cache;
    cache.forget_flags(&space.fresh, &space.lines);
    let state = Some((space.lines_read, cache.flags_read, space.droppable.clone()));
    if cache.described_of == state {
        for line in space.lines.iter().filter(|line| is_shared_memory(line)) {
            shared.backing(pid, line)?;
        }
    } else {
        let lines = space.lines.iter().filter(|line| line.name != "[vsyscall]");
        let mappings = lines.map(|line| describe_line(pid, line, space, cache, shared));
        let mappings = mappings.collect::<ObjectResult<_>>()?;
        (cache.described, cache.described_of) = (mappings, state);
    }
    Ok(AddressSpace {
        id: space.id,
        mappings: cache.described.clone(),
        layout: cache.layout.clone(),
        exe: cache.exe.clone().unwrap_or_default(),
        fresh: space.fresh.clone(),
        reset: space.reset,
    })
}

fn describe_line(
    pid: HostPid,
    line: &MapLine,
    space: &Space,
    cache: &ProcessCache,
    shared: &mut SharedTable,
) -> ObjectResult<Mapping> {
    let droppable = space.droppable_flags(line);
    let known = cache.flags_at(line.start).filter(|_| droppable == 0);
    Ok(Mapping {
        range: GuestRange::new(line.start, line.end),
        protection: line.protection,
        backing: backing(pid, line, shared)?,
        flags: flags(line, known) | droppable,
        protection_key: known.map_or(0, |known| known.protection_key),
        name: anonymous_name(line),
    })
}

fn backing(pid: HostPid, line: &MapLine, shared: &mut SharedTable) -> ObjectResult<Backing> {
    if is_shared_memory(line) {
        return shared.backing(pid, line);
    }
    let refused = |why: &str| ObjectError::refused(format!("the mapping of {}", line.name), why);
    match tracked(line) {
        Tracked::Kernel => Ok(Backing::Special { name: line.name.clone() }),
        Tracked::Private { file: false } => Ok(Backing::Anonymous),
        _ if line.name.starts_with("/anon_hugepage") => {
            Err(refused("huge pages of hugetlbfs are not carried; use transparent huge pages"))
        }
        _ if line.shared && line.name.starts_with("/dev/") => {
            Err(refused("device memory cannot be carried to another host"))
        }
        _ if line.name.starts_with("anon_inode:") || line.name.starts_with("/[") => {
            Err(refused("memory of this kernel object is not known to us (io_uring?)"))
        }
        Tracked::Private { file: true } => {
            Ok(Backing::PrivateFile { file: mapped_file(line), offset: line.offset })
        }
        Tracked::File | Tracked::Shared => Ok(Backing::SharedFile {
            file: mapped_file(line),
            offset: line.offset,
            writable: i32::from(line.protection) & libc::PROT_WRITE != 0,
        }),
    }
}

fn mapped_file(line: &MapLine) -> MappedFile {
    match line.name.strip_suffix(" (deleted)") {
        Some(path) => MappedFile {
            path: HostPath(path.to_owned()),
            unlinked_inode: Some(line.inode),
            open_file: None,
        },
        None => {
            MappedFile { path: HostPath(line.name.clone()), unlinked_inode: None, open_file: None }
        }
    }
}

fn anonymous_name(line: &MapLine) -> Option<String> {
    let name = line.name.strip_prefix("[anon:").or(line.name.strip_prefix("[anon_shmem:"))?;
    name.strip_suffix(']').map(str::to_owned)
}

fn flags(line: &MapLine, known: Option<&Flags>) -> u32 {
    let main_stack = line.name == "[stack]";
    let own = if main_stack { flag::MAIN_STACK | flag::GROWS_DOWN } else { 0 };
    own | known.map_or(0, flags_of)
}

fn flags_of(known: &Flags) -> u32 {
    const CODES: [(&[u8; 2], u32); 12] = [
        (b"gd", flag::GROWS_DOWN),
        (b"lo", flag::LOCKED),
        (b"dc", flag::DONT_FORK),
        (b"dd", flag::DONT_DUMP),
        (b"hg", flag::HUGE_PAGE),
        (b"nh", flag::NO_HUGE_PAGE),
        (b"mg", flag::MERGEABLE),
        (b"wf", flag::WIPE_ON_FORK),
        (b"sr", flag::SEQUENTIAL),
        (b"rr", flag::RANDOM),
        (b"nr", flag::NO_RESERVE),
        (b"lf", flag::LOCK_ON_FAULT),
    ];
    let found = CODES.iter().filter(|(code, _)| known.has(code));
    found.fold(0, |all, (_, flag)| all | flag)
}

/// What the calling thread has used of its processor.
fn processor_time() -> Duration {
    let time = nix::time::clock_gettime(nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID);
    time.map_or(Duration::ZERO, Duration::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(start: u64, end: u64, code: [u8; 2]) -> Flags {
        Flags { start, end, codes: vec![code], protection_key: 0 }
    }

    fn mapping(start: u64, end: u64, flags: u32) -> Mapping {
        Mapping {
            range: GuestRange::new(start, end),
            protection: 3,
            backing: Backing::Anonymous,
            flags,
            protection_key: 0,
            name: None,
        }
    }

    /// A cache that was filled a moment ago, so that nothing is read.
    fn cache(flags: Vec<Flags>) -> ProcessCache {
        let next = Some(Instant::now() + Duration::from_secs(3600));
        ProcessCache { flags, flags_next: next, ..ProcessCache::new(HostPid(1)) }
    }

    #[test]
    fn flags_of_what_stood_there_before_are_forgotten() {
        let mut cache = cache(vec![
            known(0x1000, 0x3000, *b"dc"),
            known(0x3000, 0x5000, *b"wf"),
            known(0x5000, 0x9000, *b"wf"),
            known(0x9000, 0xa000, *b"dd"),
        ]);
        cache.forget_flags(&[], &[]);
        assert_eq!((cache.flags.len(), cache.flags_read), (4, 0));
        cache.forget_flags(&[GuestRange::new(0x4000, 0x6000)], &[]);
        let left: Vec<u64> = cache.flags.iter().map(|flags| flags.start).collect();
        assert_eq!((left, cache.flags_read), (vec![0x1000, 0x9000], 1));
    }

    #[test]
    fn new_memory_is_locked_where_all_future_memory_is() {
        let mut cache = cache(vec![known(0x1000, 0x3000, *b"dc"), known(0x9000, 0xa000, *b"dd")]);
        let line = |start, end| MapLine { start, end, ..MapLine::default() };
        let lines = [line(0x1000, 0x2000), line(0x2000, 0x3000), line(0x9000, 0xa000)];
        cache.forget_flags(&[GuestRange::new(0x2000, 0x3000)], &lines);
        assert!(cache.flags_at(0x2000).is_none());
        cache.layout.lock_future = true;
        cache.forget_flags(&[GuestRange::new(0x1000, 0x3000)], &lines);
        let born = |start| cache.flags_at(start).is_some_and(|flags| flags.has(b"lo"));
        assert!(born(0x1000) && born(0x2000) && !born(0x9000));
    }

    #[test]
    fn what_is_known_late_is_not_said_of_droppable_memory() {
        let cache = cache(vec![known(0x1000, 0x2000, *b"rr"), known(0x2000, 0x3000, *b"rr")]);
        let made = flag::DROPPABLE | flag::WIPE_ON_FORK | flag::DONT_DUMP;
        let mut captured = AddressSpace {
            id: hotspare_image::memory::MmId(1),
            mappings: vec![mapping(0x1000, 0x2000, made), mapping(0x2000, 0x3000, 0)],
            layout: Layout::default(),
            exe: HostPath::default(),
            fresh: Vec::new(),
            reset: false,
        };
        cache.enter_flags(&mut captured);
        assert_eq!(captured.mappings[0].flags, made);
        assert_eq!(captured.mappings[1].flags, flag::RANDOM);
    }
}
