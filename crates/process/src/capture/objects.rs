//! Kernel objects of the stopped guest, into its checkpoint.

use std::collections::BTreeMap;

use hotspare_image::Checkpoint;
use hotspare_image::tree::{GuestPid, ProcessState};
use hotspare_kernel::remote::{Call, Stub};

use super::shared::SharedTable;
use crate::guest::Guest;
use crate::objects::capture::DescriptorCapture;
use crate::objects::error::ObjectResult;
use crate::objects::ipc::IpcCapture;
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

impl ObjectCapture {
    /// Fills in what the stopped guest has; for [`super::CheckpointRules`].
    pub fn take(
        &mut self,
        guest: &Guest,
        shared: &mut SharedTable,
        checkpoint: &mut Checkpoint,
    ) -> ObjectResult<()> {
        let hosts: BTreeMap<i32, GuestPid> =
            guest.processes.values().map(|process| (process.pid.0, process.guest_pid)).collect();
        let guest_pid = |host: i32| hosts.get(&host).copied().unwrap_or_default();
        self.ipc.capture_into(&guest_pid, shared, checkpoint)?;
        let alive: Vec<GuestPid> = living(checkpoint).collect();
        let mut inside = |pid: GuestPid, bytes: &[u8], calls: &dyn Fn(u64) -> Vec<Call>| {
            guest.call_inside(pid, bytes, calls)
        };
        self.ipc.give_back(&mut inside)?;
        self.ipc.capture_undo(&mut checkpoint.ipc, &alive, &mut inside)?;
        self.take_descriptors(guest, shared, checkpoint)
    }

    fn take_descriptors(
        &mut self,
        guest: &Guest,
        shared: &mut SharedTable,
        checkpoint: &mut Checkpoint,
    ) -> ObjectResult<()> {
        let processes: Vec<_> = living(checkpoint)
            .filter_map(|pid| {
                let host = guest.host_pid(pid)?;
                Some(GuestProcess { host, pid, pidfd: guest.pidfd(host)? })
            })
            .collect();
        let mut name = |_: (u32, u32), inode: u64| SharedTable::name_of(inode);
        let captured = self.descriptors.capture(&processes, &mut self.sockets, &mut name)?;
        for memfd in &captured.memfds {
            let (host, fd) = memfd.place;
            shared.note_descriptor(host, fd, memfd.object, memfd.kind.clone())?;
        }
        checkpoint.files = captured.files;
        let mut tables: BTreeMap<GuestPid, _> =
            processes.iter().map(|process| process.pid).zip(captured.tables).collect();
        for process in &mut checkpoint.processes {
            if let ProcessState::Alive(live) = &mut process.state {
                live.descriptors = tables.remove(&process.pid).unwrap_or_default();
            }
        }
        Ok(())
    }
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
