//! Kernel objects of the stopped guest, into its checkpoint.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};

use hotspare_image::Checkpoint;
use hotspare_image::tree::{GuestPid, ProcessState};
use hotspare_kernel::HostPid;
use hotspare_kernel::proc_maps::Maps;
use hotspare_kernel::remote::{Call, Stub};

use super::shared::SharedTable;
use crate::guest::Guest;
use crate::objects::capture::{Captured, DescriptorCapture};
use crate::objects::error::{ObjectError, ObjectResult};
use crate::objects::ipc::{IpcCapture, IpcState};
use crate::objects::socket::SocketCapture;
use crate::objects::table::GuestProcess;

/// Takes everything that processes hold beyond memory, epoch after epoch.
pub struct ObjectCapture {
    /// Open files.
    pub descriptors: DescriptorCapture,
    /// Sockets among them.
    pub sockets: SocketCapture,
    /// What has no descriptor.
    pub ipc: IpcCapture,
}

/// A process of the stopped guest, for a look from any thread.
#[derive(Clone, Debug)]
struct Stopped {
    host: HostPid,
    pid: GuestPid,
    pidfd: Arc<OwnedFd>,
    maps: Option<Arc<Mutex<Maps>>>,
}

/// All processes of the stopped guest.
#[derive(Clone, Debug)]
pub struct StoppedProcesses(Vec<Stopped>);

/// What [`ObjectCapture::look`] saw.
#[derive(Debug)]
pub struct Seen {
    processes: StoppedProcesses,
    ipc: IpcState,
    descriptors: Captured,
}

impl StoppedProcesses {
    /// Those of a guest, to be looked at until it goes on.
    pub fn of(guest: &Guest) -> Self {
        let each = guest.processes.values().map(|process| Stopped {
            host: process.pid,
            pid: process.guest_pid,
            pidfd: process.pidfd.clone(),
            maps: process
                .space
                .as_ref()
                .filter(|space| !space.has_same_lines())
                .map(|space| space.maps.clone()),
        });
        Self(each.collect())
    }

    /// Reads the mappings, which the guest's owner will want in a moment. Those of a process that
    /// has just died it will miss itself.
    pub fn read_ahead(&self) {
        for maps in self.0.iter().filter_map(|process| process.maps.as_ref()) {
            if let Ok(mut maps) = maps.try_lock() {
                drop(maps.read_ahead());
            }
        }
    }

    fn numbers(&self) -> BTreeMap<i32, GuestPid> {
        self.0.iter().map(|process| (process.host.0, process.pid)).collect()
    }
}

impl ObjectCapture {
    /// Looks at the stopped guest from outside. Any thread can do this while the guest's owner has
    /// its threads answer about themselves; the guest stands still until it is done.
    pub fn look(&mut self, processes: StoppedProcesses) -> ObjectResult<Seen> {
        let numbers = processes.numbers();
        let guest_pid = |host: i32| numbers.get(&host).copied().unwrap_or_default();
        let ipc = self.ipc.capture(&guest_pid)?;
        let each = processes.0.iter().map(|process| GuestProcess {
            host: process.host,
            pid: process.pid,
            pidfd: process.pidfd.as_fd(),
        });
        let each: Vec<_> = each.collect();
        let mut name = |_: (u32, u32), inode: u64| SharedTable::name_of(inode);
        let descriptors = self.descriptors.capture(&each, &mut self.sockets, &mut name)?;
        Ok(Seen { processes, ipc, descriptors })
    }

    /// Enters what was seen at this stop, and asks the guest for what only it can tell. What has
    /// not changed at all is left to [`ObjectCapture::complete`].
    pub fn enter(
        &mut self,
        seen: Seen,
        guest: &Guest,
        shared: &mut SharedTable,
        checkpoint: &mut Checkpoint,
    ) -> ObjectResult<()> {
        let Seen { processes, ipc, descriptors } = seen;
        let numbers = processes.numbers();
        let guest_pid = |host: i32| numbers.get(&host).copied().unwrap_or_default();
        self.ipc.enter(ipc, &guest_pid, shared, checkpoint)?;
        let alive: Vec<GuestPid> = living(checkpoint).collect();
        let mut inside = |pid: GuestPid, bytes: &[u8], calls: &dyn Fn(u64) -> Vec<Call>| {
            guest.call_inside(pid, bytes, calls)
        };
        self.ipc.give_back(&mut inside)?;
        self.ipc.capture_undo(&mut checkpoint.ipc, &alive, &mut inside)?;
        enter_descriptors(&processes, descriptors, shared, checkpoint)
    }

    /// Enters what has not changed since the checkpoint before, and is not looked at: after
    /// [`ObjectCapture::enter`] and before the next look, whether the guest stands still or runs.
    pub fn complete(&self, checkpoint: &mut Checkpoint) {
        checkpoint.files.extend(self.descriptors.resting_files());
    }

    /// Fills in what the stopped guest has; for [`super::CheckpointRules`].
    pub fn take(
        &mut self,
        guest: &Guest,
        shared: &mut SharedTable,
        checkpoint: &mut Checkpoint,
    ) -> ObjectResult<()> {
        let seen = self.look(StoppedProcesses::of(guest))?;
        self.enter(seen, guest, shared, checkpoint)?;
        self.complete(checkpoint);
        Ok(())
    }
}

fn enter_descriptors(
    processes: &StoppedProcesses,
    captured: Captured,
    shared: &mut SharedTable,
    checkpoint: &mut Checkpoint,
) -> ObjectResult<()> {
    let seen: BTreeSet<GuestPid> = processes.0.iter().map(|process| process.pid).collect();
    if seen != living(checkpoint).collect() {
        let reason = "one of its processes ended while it was looked at";
        return Err(ObjectError::transient("the guest", reason));
    }
    for memfd in &captured.memfds {
        let (host, fd) = memfd.place;
        shared.note_descriptor(host, fd, memfd.object, memfd.kind.clone())?;
    }
    checkpoint.files = captured.files;
    let numbers = processes.0.iter().map(|process| process.pid);
    let mut tables: BTreeMap<GuestPid, _> = numbers.zip(captured.tables).collect();
    for process in &mut checkpoint.processes {
        if let ProcessState::Alive(live) = &mut process.state {
            live.descriptors = tables.remove(&process.pid).unwrap_or_default();
        }
    }
    Ok(())
}

fn living(checkpoint: &Checkpoint) -> impl Iterator<Item = GuestPid> + '_ {
    checkpoint.processes.iter().filter_map(|process| match process.state {
        ProcessState::Alive(_) => Some(process.pid),
        ProcessState::Zombie { .. } => None,
    })
}

impl Guest {
    /// Makes calls in stopped process `pid`: given the bytes they use, and the calls for the
    /// address at which those lie. `None` for a process that cannot make calls in this stop.
    fn call_inside(
        &self,
        pid: GuestPid,
        bytes: &[u8],
        calls: &dyn Fn(u64) -> Vec<Call>,
    ) -> ObjectResult<Option<Vec<i64>>> {
        let mut all = self.processes.values();
        let process = all.find(|process| process.guest_pid == pid);
        let Some((process, stub)) = process.and_then(|each| Some((each, each.stub.as_ref()?)))
        else {
            return Ok(None);
        };
        let Ok(thread) = self.visitable_thread(process.pid) else { return Ok(None) };
        stub.memory().write(Stub::scratch_offset(0), bytes);
        let mut calls = calls(stub.scratch(0));
        stub.run(thread, 0, &mut calls)?;
        Ok(Some(calls.iter().map(|call| call.result).collect()))
    }
}
