//! The ghost: a stopped, fully built copy of the guest, one step from live.
//!
//! ```text
//! new ──▶ begin_full ──▶ fill … ──▶ apply ──▶ apply … ──▶ finalise ──▶ release
//!          layout         pages      an epoch each          the rest      it runs
//! ```
//!
//! The processes are real and traced by the thread that made the ghost; every call on a [`Ghost`]
//! must come from that thread. They have the guest's numbers, tree and memory at any time.
//! Registers, descriptors, timers, credentials and the like are put in at [`Ghost::finalise`],
//! because the kernel acts on them or refuses our calls once they are set.

use std::collections::BTreeMap;
use std::os::fd::{BorrowedFd, OwnedFd};

use hotspare_image::Checkpoint;
use hotspare_image::memory::{AddressSpace, MmId, PageOwner, SharedId};
use hotspare_image::objects::FileId;
use hotspare_image::tree::{ClockReading, GuestPid, LiveProcess, Process, ProcessState};
use hotspare_kernel::kill_point::{KillPoint, pass};
use hotspare_kernel::{HostPid, ptrace};

use crate::init::{ClockOffsets, GuestNamespaces, Init, InitConfig};
use crate::pages::PageRun;

mod ahead;
mod attributes;
mod body;
pub mod copy;
mod descriptors;
mod error;
mod files;
mod fill;
mod finalise;
mod hands;
mod ipc_users;
mod late;
mod layout;
mod sources;
mod threads;
mod tree;

pub use error::{GhostError, GhostResult};
pub use files::FileWorld;
pub use finalise::Finalised;
pub use late::needed_at_once;

use body::Body;
use sources::SourceSet;

/// What a ghost needs besides checkpoints.
#[derive(Debug)]
pub struct GhostConfig {
    /// How its init is started. The clock offsets decide how its clocks go on:
    /// [`clock_offsets`].
    pub init: InitConfig,
    /// Replicated directories as the guest sees them.
    pub replicated: Vec<String>,
}

/// A copy of the guest that stands still. Dropping it ends its processes.
#[derive(Debug)]
pub struct Ghost {
    // Always there, until released.
    init: Option<Init>,
    clocks: ClockOffsets,
    namespaces: GuestNamespaces,
    bodies: BTreeMap<GuestPid, Body>,
    sources: SourceSet,
    names: (String, String),
    replicated: Vec<String>,
    /// A full transfer is under way: what has arrived is not to be emptied again.
    full: bool,
    image: Option<Checkpoint>,
}

/// A thread of the guest that now runs, traced by the calling thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunningThread {
    /// Its process, in the guest's numbering.
    pub process: GuestPid,
    /// Its number in the guest.
    pub tid: GuestPid,
    /// Its number on this host.
    pub host: HostPid,
}

const SECOND_NS: i64 = 1_000_000_000;
/// Oldest a first checkpoint is believed to be: its staging takes time, but clocks of the day may
/// disagree, and the guest's would leap by that.
const AGE_MAX_NS: i64 = 5 * SECOND_NS;

fn clock_ns(clock: nix::time::ClockId) -> i64 {
    let time = nix::time::clock_gettime(clock);
    time.map_or(0, |time| time.tv_sec() * SECOND_NS + time.tv_nsec())
}

/// Offsets that make the clocks of a guest started now on this host go on from `reading`. How old
/// that is, is told by the hosts' clocks of the day; what they say beyond five seconds is not
/// believed.
pub fn clock_offsets(reading: ClockReading) -> ClockOffsets {
    use nix::time::ClockId;
    let age = clock_ns(ClockId::CLOCK_REALTIME) - reading.realtime_ns as i64;
    let age = age.clamp(0, AGE_MAX_NS);
    ClockOffsets {
        monotonic_ns: reading.monotonic_ns as i64 + age - clock_ns(ClockId::CLOCK_MONOTONIC),
        boottime_ns: reading.boottime_ns as i64 + age - clock_ns(ClockId::CLOCK_BOOTTIME),
    }
}

impl Ghost {
    /// Makes the namespaces and an empty ghost in them.
    pub fn new(config: GhostConfig) -> GhostResult<Self> {
        let clocks = config.init.surroundings.clocks;
        let init = Init::start(config.init)?;
        let namespaces = init.namespaces()?;
        Ok(Self {
            init: Some(init),
            clocks,
            namespaces,
            bodies: BTreeMap::new(),
            sources: SourceSet::default(),
            names: Default::default(),
            replicated: config.replicated,
            full: false,
            image: None,
        })
    }

    /// The clocks as the ghost would read them.
    fn now(&self) -> ClockReading {
        use nix::time::ClockId;
        let ahead = |clock, offset: i64| (clock_ns(clock) + offset).max(0) as u64;
        ClockReading {
            realtime_ns: ahead(ClockId::CLOCK_REALTIME, 0),
            monotonic_ns: ahead(ClockId::CLOCK_MONOTONIC, self.clocks.monotonic_ns),
            boottime_ns: ahead(ClockId::CLOCK_BOOTTIME, self.clocks.boottime_ns),
        }
    }

    /// PID 1 of the ghost's namespaces.
    pub fn init(&self) -> &Init {
        self.init.as_ref().expect("only release takes it away")
    }

    /// The ghost's namespaces, for the restore of kernel objects.
    pub fn namespaces(&self) -> &GuestNamespaces {
        &self.namespaces
    }

    /// The last checkpoint that was applied.
    pub fn image(&self) -> Option<&Checkpoint> {
        self.image.as_ref()
    }

    /// The memory object behind descriptors and mappings of shared memory.
    pub fn shared_memory(&self, id: SharedId) -> Option<BorrowedFd<'_>> {
        self.sources.shared(id)
    }

    /// All memory objects, for a restore on another thread.
    pub fn all_shared_memory(&self) -> BTreeMap<SharedId, BorrowedFd<'_>> {
        self.sources.all_shared().collect()
    }

    /// The processes of the ghost on this host.
    pub fn host_pids(&self) -> BTreeMap<GuestPid, HostPid> {
        self.bodies.values().map(|body| (body.pid, body.host)).collect()
    }

    /// A process of the ghost on this host.
    pub fn host_pid(&self, process: GuestPid) -> Option<HostPid> {
        self.bodies.get(&process).map(|body| body.host)
    }

    /// Takes on the tree and layout of a full transfer, before its pages. May be called again
    /// while the transfer goes on, when the layout has changed; what has arrived stays.
    pub fn begin_full(&mut self, layout: &Checkpoint) -> GhostResult<()> {
        self.take_on(layout)?;
        self.full = true;
        Ok(())
    }

    /// Writes pages, in order. Parts that lie in no mapping are skipped.
    pub fn fill(&mut self, runs: &mut dyn Iterator<Item = PageRun>) -> GhostResult<()> {
        let spaces: BTreeMap<MmId, GuestPid> = self
            .bodies
            .values()
            .filter(|body| !body.zombie)
            .filter_map(|body| Some((body.space?, body.pid)))
            .collect();
        let mut gathered: BTreeMap<MmId, fill::Gathered> = BTreeMap::new();
        for run in runs {
            fill::check(&run)?;
            match run.owner {
                PageOwner::Shared(id) => self.sources.fill_shared(id, &run)?,
                PageOwner::Mm(id) => {
                    let Some(body) = spaces.get(&id).and_then(|pid| self.bodies.get(pid)) else {
                        continue;
                    };
                    gathered.entry(id).or_default().add(body, &run)?;
                }
            }
        }
        for (id, mut gathered) in gathered {
            if let Some(body) = spaces.get(&id).and_then(|pid| self.bodies.get(pid)) {
                gathered.flush(body)?;
            }
        }
        Ok(())
    }

    /// Becomes the guest of this checkpoint: tree, layout, then pages in order.
    ///
    /// The checkpoint must be whole and checked: a failure half way leaves a ghost that must be
    /// built anew.
    pub fn apply(
        &mut self,
        mut checkpoint: Checkpoint,
        runs: &mut dyn Iterator<Item = PageRun>,
    ) -> GhostResult<()> {
        if self.full {
            // Mapped afresh by `begin_full`; once more would wipe what has been filled in.
            checkpoint.spaces.iter_mut().for_each(|space| space.fresh.clear());
        }
        self.take_on(&checkpoint)?;
        pass(KillPoint::Applying);
        self.fill(runs)?;
        self.end_zombies(&checkpoint)?;
        self.full = false;
        self.image = Some(checkpoint);
        Ok(())
    }

    fn take_on(&mut self, checkpoint: &Checkpoint) -> GhostResult<()> {
        if self.names != checkpoint.names {
            self.init().set_names(&checkpoint.names.0, &checkpoint.names.1)?;
            self.names.clone_from(&checkpoint.names);
        }
        self.sync_tree(checkpoint)?;
        let (shared, bodies) = (&checkpoint.shared, &self.bodies);
        self.sources.sync_shared(shared, self.full, &self.namespaces, bodies)?;
        let changed = checkpoint.spaces.iter().filter(|space| self.differs(space));
        let changed: Vec<&AddressSpace> = changed.collect();
        let namespaces = &self.namespaces;
        self.sources.open_files(changed.into_iter(), namespaces, &self.replicated)?;
        for (pid, live) in living(checkpoint) {
            let space = space(checkpoint, live.mm)?;
            let Some(body) = self.bodies.get_mut(&pid) else { continue };
            let exe = body.dressed.needs_program(space).then(|| self.sources.program(space));
            body.take_layout(space, &self.sources)
                .and_then(|()| body.dress_ahead(live, space, exe.flatten()))
                .map_err(GhostError::at(pid))?;
        }
        self.sources.close_files();
        Ok(())
    }

    fn differs(&self, space: &AddressSpace) -> bool {
        let body = self.bodies.values().find(|body| body.space == Some(space.id));
        body.is_none_or(|body| {
            body.layout != space.mappings
                || !space.fresh.is_empty()
                || body.dressed.needs_program(space)
        })
    }

    /// Whether the process's address space has nothing to do with what its ghost holds.
    fn is_new_space(&self, body: &Body, space: &AddressSpace) -> bool {
        match body.space {
            None => false,
            Some(id) => id != space.id || space.reset && !self.full,
        }
    }

    /// Lets everything run. The threads stay traced by the calling thread.
    pub fn release(mut self, finalised: Finalised) -> GhostResult<Released> {
        let Finalised { threads, stopped, parts } = finalised;
        for thread in &threads {
            let resumed = if stopped.contains(&thread.process) {
                ptrace::listen(thread.host)
            } else {
                ptrace::cont(thread.host, 0)
            };
            match resumed {
                // Those let go before it have ended it already.
                Err(error) if error.is_died() => {}
                other => other?,
            }
        }
        // Nothing of it is ours to end any more.
        self.bodies.clear();
        match self.init.take() {
            Some(init) => Ok(Released { init, threads, stopped, parts }),
            None => Err(GhostError::Image("a ghost without init".into())),
        }
    }
}

impl Drop for Ghost {
    /// Ends the processes, and takes their ends as their tracer: until somebody does, PID 1 of a
    /// pid namespace cannot end.
    fn drop(&mut self) {
        let Some(init) = self.init.take() else { return };
        init.kill();
        for body in self.bodies.values().filter(|body| !body.zombie) {
            for (_, host) in body.threads.iter().rev() {
                let _ = hands::await_end(*host);
            }
        }
        let _ = hands::await_end(init.host_pid());
    }
}

/// A guest that runs on this host now.
#[derive(Debug)]
pub struct Released {
    /// Its PID 1.
    pub init: Init,
    /// Its threads.
    pub threads: Vec<RunningThread>,
    /// Processes left in a job-control stop; their threads report it to the tracer.
    pub stopped: Vec<GuestPid>,
    /// How long each part of the finalising took.
    pub parts: Vec<(&'static str, std::time::Duration)>,
}

/// The living processes of a checkpoint.
fn living(checkpoint: &Checkpoint) -> impl Iterator<Item = (GuestPid, &LiveProcess)> {
    checkpoint.processes.iter().filter_map(|process: &Process| match &process.state {
        ProcessState::Alive(live) => Some((process.pid, &**live)),
        ProcessState::Zombie { .. } => None,
    })
}

fn space(checkpoint: &Checkpoint, id: MmId) -> GhostResult<&AddressSpace> {
    checkpoint
        .spaces
        .iter()
        .find(|space| space.id == id)
        .ok_or_else(|| GhostError::Image(format!("no address space {}", id.0)))
}

/// Open files by their name in the checkpoint.
pub type RestoredFiles = BTreeMap<FileId, OwnedFd>;
