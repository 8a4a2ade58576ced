//! One ghost process: an almost empty address space that takes on the guest's layout.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use hotspare_image::memory::{AddressSpace, Backing, GuestRange, Mapping, MmId, mapping_flags};
use hotspare_image::tree::{Credentials, GuestPid, SignalAction};
use hotspare_kernel::memory::ProcMem;
use hotspare_kernel::proc_maps::MapLine;
use hotspare_kernel::ptrace::HostPid;
use hotspare_kernel::remote::vdso_syscall;
use hotspare_kernel::{pidfd, spawn, thread_info};

use super::ahead::Dressed;
use super::error::{GhostError, GhostResult};
use super::hands::{Batch, Hands, borrow, maps_of};
use super::layout::{Change, changes, offset_at};

/// Descriptors every ghost process has until it goes live: a pidfd of the agent, and the idle
/// program.
pub(super) const TOOLS: [i32; 2] = [200, 201];

/// A ghost process. Its threads stand still; signals are blocked.
#[derive(Debug)]
pub(super) struct Body {
    pub(super) pid: GuestPid,
    pub(super) host: HostPid,
    pub(super) pidfd: OwnedFd,
    pub(super) parent: GuestPid,
    pub(super) group: GuestPid,
    pub(super) session: GuestPid,
    /// Ended; waits for its parent.
    pub(super) zombie: bool,
    /// The guest's number and the host's; the leader first.
    pub(super) threads: Vec<(GuestPid, HostPid)>,
    pub(super) hands: Hands,
    pub(super) memory: ProcMem,
    /// The address space it has taken on; `None` while it has none of the guest's.
    pub(super) space: Option<MmId>,
    pub(super) layout: Vec<Mapping>,
    /// What it has of the guest's beyond memory.
    pub(super) dressed: Dressed,
    /// What it can do until it goes live.
    pub(super) credentials: Credentials,
    pub(super) subreaper: bool,
}

/// Where mapped files and shared memory come from: descriptors of ours.
pub(super) trait Sources {
    /// The descriptor to map, opened as the mapping needs it.
    fn descriptor(&self, mapping: &Mapping) -> GhostResult<BorrowedFd<'_>>;

    /// Number and size of the System V segment behind a mapping, if it is one.
    fn segment(&self, mapping: &Mapping) -> Option<(i32, u64)>;
}

impl Body {
    /// Takes over a process that stands before the first instruction of the idle program.
    pub(super) fn new(
        pid: GuestPid,
        host: HostPid,
        parent: &Place,
        target: &[Mapping],
    ) -> GhostResult<Self> {
        let pidfd = pidfd::open(host)?;
        let hands = reach(host, borrow(&pidfd), target)?;
        raise_limits(host)?;
        let mut body = Self {
            pid,
            host,
            parent: parent.parent,
            group: parent.group,
            session: parent.session,
            zombie: false,
            threads: vec![(pid, host)],
            memory: ProcMem::open(host)?,
            pidfd,
            hands,
            space: None,
            layout: Vec::new(),
            dressed: Dressed::after_exec(&parent.actions),
            credentials: own_credentials(host)?,
            subreaper: false,
        };
        body.strip(target)?;
        Ok(body)
    }

    /// A batch of calls for the leader.
    pub(super) fn batch(&self) -> Batch<'_> {
        self.hands.batch(self.host)
    }

    /// Replaces the address space by an empty one; the process must be down to its leader.
    pub(super) fn empty(&mut self, target: &[Mapping]) -> GhostResult<()> {
        self.hands.execute_idle(self.host, TOOLS[1])?;
        self.hands = reach(self.host, borrow(&self.pidfd), target)?;
        self.memory = ProcMem::open(self.host)?;
        self.space = None;
        self.dressed = Dressed::after_exec(&self.dressed.actions);
        self.strip(target)
    }

    /// Leaves only the stub and the kernel's own pages, those where `target` has them.
    fn strip(&mut self, target: &[Mapping]) -> GhostResult<()> {
        let maps = maps_of(self.host)?;
        let (stub, _) = self.hands.stub.range();
        let mut batch = self.hands.batch(self.host);
        let mut specials = Vec::new();
        for map in &maps {
            if is_special(&map.name) {
                specials.push(map);
            } else if map.start != stub && map.name != "[vsyscall]" {
                batch.room(0, 1)?;
                let bytes = map.end - map.start;
                batch.must("unmap idle program", libc::SYS_munmap, &[map.start, bytes]);
            }
        }
        let wanted: Vec<_> = target
            .iter()
            .filter(|mapping| matches!(mapping.backing, Backing::Special { .. }))
            .cloned()
            .collect();
        let parking = parking_place(&maps, target)?;
        let mut parked = Vec::new();
        let mut at = parking;
        for map in specials {
            let bytes = map.end - map.start;
            move_mapping(&mut batch, map.start, bytes, at);
            parked.push((map.name.as_str(), at, bytes));
            at += bytes;
        }
        for mapping in &wanted {
            let Backing::Special { name } = &mapping.backing else { continue };
            let found = parked
                .iter()
                .position(|(parked, _, bytes)| parked == name && *bytes == mapping.range.bytes());
            let found = found.ok_or_else(|| {
                GhostError::refused(format!("mapping {name}"), "this kernel has no such pages")
            })?;
            let (_, from, bytes) = parked.swap_remove(found);
            move_mapping(&mut batch, from, bytes, mapping.range.start.0);
        }
        for (_, from, bytes) in parked {
            batch.must("unmap the kernel's pages", libc::SYS_munmap, &[from, bytes]);
        }
        batch.run()?;
        self.layout = wanted;
        Ok(())
    }

    /// Takes on the layout of `space`. Content of what is mapped anew is as the kernel makes it.
    pub(super) fn take_layout(
        &mut self,
        space: &AddressSpace,
        sources: &dyn Sources,
    ) -> GhostResult<()> {
        if self.space == Some(space.id) && self.layout == space.mappings && space.fresh.is_empty() {
            return Ok(());
        }
        check_mappings(&space.mappings)?;
        let (start, end) = self.hands.stub.range();
        let stub = GuestRange::new(start, end);
        if space.mappings.iter().any(|mapping| mapping.range.overlaps(stub)) {
            self.move_stub(&space.mappings)?;
        }
        let todo = changes(&self.layout, &space.mappings, &space.fresh);
        let mut batch = self.hands.batch(self.host);
        for change in &todo {
            change_mapping(&mut batch, change, &space.mappings, sources)?;
        }
        batch.run()?;
        self.layout.clone_from(&space.mappings);
        self.space = Some(space.id);
        Ok(())
    }

    fn move_stub(&mut self, target: &[Mapping]) -> GhostResult<()> {
        let instruction = self.hands.stub.syscall_instruction();
        let old = self.hands.stub.range();
        let taken = taken(&maps_of(self.host)?, target);
        self.hands = Hands::reach(self.host, borrow(&self.pidfd), &taken, instruction)?;
        let mut batch = self.hands.batch(self.host);
        batch.must("unmap old stub", libc::SYS_munmap, &[old.0, old.1 - old.0]);
        batch.run()?;
        Ok(())
    }

    /// The mapping that holds `address`.
    pub(super) fn mapping_at(&self, address: u64) -> Option<&Mapping> {
        let after = self.layout.partition_point(|mapping| mapping.range.end.0 <= address);
        self.layout.get(after).filter(|mapping| mapping.range.start.0 <= address)
    }
}

/// A new process's place in the tree, and its maker's signal actions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) actions: Vec<SignalAction>,
    pub(super) parent: GuestPid,
    pub(super) group: GuestPid,
    pub(super) session: GuestPid,
}

fn own_credentials(host: HostPid) -> GhostResult<Credentials> {
    let status = thread_info::status(host)?;
    Ok(Credentials {
        uids: status.uids,
        gids: status.gids,
        groups: status.groups,
        capabilities: status.capabilities,
        securebits: 0,
        no_new_privs: status.no_new_privs,
    })
}

fn reach(host: HostPid, pidfd: BorrowedFd<'_>, target: &[Mapping]) -> GhostResult<Hands> {
    let maps = maps_of(host)?;
    let instruction = vdso_syscall(host, &maps)?;
    Ok(Hands::reach(host, pidfd, &taken(&maps, target), instruction)?)
}

/// Both what is mapped and what will be, in address order.
fn taken(maps: &[MapLine], target: &[Mapping]) -> Vec<MapLine> {
    let mut all = maps.to_vec();
    all.extend(target.iter().map(|mapping| MapLine {
        start: mapping.range.start.0,
        end: mapping.range.end.0,
        protection: 0,
        shared: false,
        offset: 0,
        device: (0, 0),
        inode: 0,
        name: String::new(),
    }));
    all.sort_by_key(|map| map.start);
    all
}

fn is_special(name: &str) -> bool {
    matches!(name, "[vdso]" | "[vvar]" | "[vvar_vclock]")
}

/// Room for the kernel's own pages, away from everything.
fn parking_place(maps: &[MapLine], target: &[Mapping]) -> GhostResult<u64> {
    let bytes = maps.iter().filter(|map| is_special(&map.name)).map(|map| map.end - map.start);
    let bytes = bytes.sum::<u64>();
    Ok(hotspare_kernel::remote::free_address(&taken(maps, target), bytes + 4096)?)
}

fn move_mapping(batch: &mut Batch<'_>, from: u64, bytes: u64, to: u64) {
    if from != to {
        let flags = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) as u64;
        let arguments = [from, bytes, bytes, flags, to];
        batch.must("move the kernel's pages", libc::SYS_mremap, &arguments);
    }
}

/// Limits that would hinder the building; the guest's own are set at the end.
fn raise_limits(host: HostPid) -> GhostResult<()> {
    let limits = thread_info::limits(host)?;
    let raised = [libc::RLIMIT_DATA, libc::RLIMIT_AS, libc::RLIMIT_MEMLOCK, libc::RLIMIT_NOFILE];
    for (resource, (_, hard)) in (0u32..).zip(limits) {
        if resource == libc::RLIMIT_CORE {
            spawn::set_limit(host, resource, 0, hard)?;
        } else if raised.contains(&resource) {
            spawn::set_limit(host, resource, hard, hard)?;
        }
    }
    Ok(())
}

fn check_mappings(mappings: &[Mapping]) -> GhostResult<()> {
    let mut last = 0;
    for mapping in mappings {
        let range = mapping.range;
        let aligned = range.start.0.is_multiple_of(4096) && range.end.0.is_multiple_of(4096);
        if range.start.0 < last || range.bytes() == 0 || !aligned || range.end.0 > 1 << 47 {
            return Err(GhostError::Image(format!("mapping {range:?}")));
        }
        if mapping.protection_key != 0 {
            let reason = "protection keys are not supported";
            return Err(GhostError::refused(format!("mapping {:#x}", range.start.0), reason));
        }
        last = range.end.0;
    }
    Ok(())
}

fn change_mapping(
    batch: &mut Batch<'_>,
    change: &Change,
    mappings: &[Mapping],
    sources: &dyn Sources,
) -> GhostResult<()> {
    batch.room(256, 12)?;
    match change {
        Change::Unmap(piece) => {
            batch.must("unmap memory", libc::SYS_munmap, &[piece.start.0, piece.bytes()]);
        }
        Change::Protect(piece, protection) => {
            let arguments = [piece.start.0, piece.bytes(), u64::from(*protection)];
            batch.must("protect memory", libc::SYS_mprotect, &arguments);
        }
        Change::Flags(piece, index, old) => advise(batch, *piece, &mappings[*index], *old)?,
        Change::Map(piece, index) => {
            let mapping = &mappings[*index];
            map_piece(batch, *piece, mapping, sources)?;
            advise(batch, *piece, mapping, 0)?;
        }
    }
    Ok(())
}

/// The guest's host has it, so a spare with another kernel must say what it lacks.
const MAP_DROPPABLE: &str = "map memory with MAP_DROPPABLE (Linux 6.11 or newer is needed)";

fn map_piece(
    batch: &mut Batch<'_>,
    piece: GuestRange,
    mapping: &Mapping,
    sources: &dyn Sources,
) -> GhostResult<()> {
    let droppable = mapping.flags & mapping_flags::DROPPABLE != 0;
    let (kind, from_file) = match &mapping.backing {
        Backing::Anonymous if droppable => (libc::MAP_ANONYMOUS | libc::MAP_DROPPABLE, false),
        Backing::Anonymous => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, false),
        Backing::PrivateFile { .. } => (libc::MAP_PRIVATE, true),
        Backing::SharedFile { .. } => (libc::MAP_SHARED, true),
        Backing::SharedMemory { private: true, .. } => (libc::MAP_PRIVATE, true),
        Backing::SharedMemory { private: false, .. } => (libc::MAP_SHARED, true),
        Backing::Special { name } => {
            return Err(GhostError::Rebuild(format!("{name} has moved")));
        }
    };
    let mut flags = kind | libc::MAP_FIXED;
    if mapping.flags & mapping_flags::GROWS_DOWN != 0 {
        flags |= libc::MAP_GROWSDOWN;
    }
    if mapping.flags & mapping_flags::NO_RESERVE != 0 {
        flags |= libc::MAP_NORESERVE;
    }
    let (start, bytes) = (piece.start.0, piece.bytes());
    let protection = u64::from(mapping.protection);
    if !from_file {
        let arguments = [start, bytes, protection, flags as u64, u64::MAX, 0];
        let what = if droppable { MAP_DROPPABLE } else { "map memory" };
        batch.must(what, libc::SYS_mmap, &arguments);
        return Ok(());
    }
    if let Some((id, size)) = sources.segment(mapping)
        && size.next_multiple_of(4096) == bytes
    {
        // Attached, so that shmdt(2) and the count of attachments know it. A part of a segment,
        // after munmap(2) or mprotect(2), is only mapped.
        let arguments = [id as u64, start, libc::SHM_REMAP as u64];
        batch.must("attach segment", libc::SYS_shmat, &arguments);
        let arguments = [start, bytes, protection];
        batch.must("protect segment", libc::SYS_mprotect, &arguments);
        return Ok(());
    }
    let file = sources.descriptor(mapping)?.as_raw_fd() as u64;
    // A ghost has no descriptors but its tools, so what it takes gets number 0.
    let take = [TOOLS[0] as u64, file, 0];
    batch.must("take mapped file", libc::SYS_pidfd_getfd, &take);
    let offset = offset_at(mapping, piece);
    let arguments = [start, bytes, protection, flags as u64, 0, offset];
    batch.must("map file", libc::SYS_mmap, &arguments);
    batch.must("close mapped file", libc::SYS_close, &[0]);
    Ok(())
}

/// Each flag with the advice that sets and the one that clears it (madvise(2)).
const ADVICE: [(u32, i32, Option<i32>); 8] = [
    (mapping_flags::DONT_FORK, libc::MADV_DONTFORK, Some(libc::MADV_DOFORK)),
    (mapping_flags::DONT_DUMP, libc::MADV_DONTDUMP, Some(libc::MADV_DODUMP)),
    (mapping_flags::HUGE_PAGE, libc::MADV_HUGEPAGE, None),
    (mapping_flags::NO_HUGE_PAGE, libc::MADV_NOHUGEPAGE, None),
    (mapping_flags::MERGEABLE, libc::MADV_MERGEABLE, Some(libc::MADV_UNMERGEABLE)),
    (mapping_flags::WIPE_ON_FORK, libc::MADV_WIPEONFORK, Some(libc::MADV_KEEPONFORK)),
    (mapping_flags::SEQUENTIAL, libc::MADV_SEQUENTIAL, Some(libc::MADV_NORMAL)),
    (mapping_flags::RANDOM, libc::MADV_RANDOM, Some(libc::MADV_NORMAL)),
];

fn advise(
    batch: &mut Batch<'_>,
    piece: GuestRange,
    mapping: &Mapping,
    old: u32,
) -> GhostResult<()> {
    let (start, bytes) = (piece.start.0, piece.bytes());
    for (flag, set, clear) in ADVICE {
        let advice = match (mapping.flags & flag != 0, old & flag != 0) {
            (true, false) => Some(set),
            (false, true) => clear,
            (true, true) | (false, false) => None,
        };
        if let Some(advice) = advice {
            batch.must("advise memory", libc::SYS_madvise, &[start, bytes, advice as u64]);
        }
    }
    let locks = mapping_flags::LOCKED | mapping_flags::LOCK_ON_FAULT;
    if mapping.flags & locks != old & locks {
        if mapping.flags & locks == 0 {
            batch.must("unlock memory", libc::SYS_munlock, &[start, bytes]);
        } else {
            // Locking brings pages in; which are there is decided by the guest's own touches.
            let on_fault = u64::from(libc::MLOCK_ONFAULT);
            batch.must("lock memory", libc::SYS_mlock2, &[start, bytes, on_fault]);
        }
    }
    if let Some(name) = &mapping.name {
        const PR_SET_VMA: u64 = 0x5356_4d41;
        let text = batch.text(name.as_bytes());
        batch.may(libc::SYS_prctl, &[PR_SET_VMA, 0, start, bytes, text]);
    }
    Ok(())
}
