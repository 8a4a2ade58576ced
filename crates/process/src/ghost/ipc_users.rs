//! Who used System V objects last, and what semaphores get back when a process ends.
//!
//! The kernel notes the caller, so each ghost process that was the last to use an object uses it
//! once more, in a way that leaves no trace: a semaphore is raised and lowered in one operation, a
//! message of its own type is sent and received, a segment attached and detached.

use std::os::fd::AsFd;

use hotspare_image::Checkpoint;
use hotspare_image::ipc::{SegmentUse, SemaphoreSet, SysvQueue};
use hotspare_image::tree::GuestPid;
use hotspare_kernel::ipc::{self as kernel_ipc, SemaphoreChange, semaphore_changes};

use super::Ghost;
use super::body::Body;
use super::error::{GhostError, GhostResult};
use crate::objects::ipc;
use crate::objects::semaphore_undo;

const NOWAIT: u64 = libc::IPC_NOWAIT as u64;

impl Ghost {
    /// To be done when everything is in its place and the processes still may do anything.
    pub(super) fn use_ipc(&self, image: &Checkpoint) -> GhostResult<()> {
        for set in &image.ipc.semaphores {
            self.use_semaphores(set)?;
        }
        for queue in &image.ipc.message_queues {
            self.use_queue(queue)?;
        }
        image.ipc.segments.iter().try_for_each(|segment| self.use_segment(segment))
    }

    fn living_body(&self, pid: GuestPid) -> Option<&Body> {
        self.bodies.get(&pid).filter(|body| !body.zombie)
    }

    fn use_semaphores(&self, set: &SemaphoreSet) -> GhostResult<()> {
        for undo in &set.undo {
            let value = set.values.get(usize::from(undo.index)).map_or(0, |(value, _)| *value);
            let changes = semaphore_undo::restoring(undo, value);
            if let Some(body) = self.living_body(undo.process) {
                change(body, set.owner.id, &changes).map_err(GhostError::at(undo.process))?;
            }
        }
        // Behind the adjustments, whose makers the kernel notes as well.
        for (index, (value, last)) in (0u16..).zip(&set.values) {
            let Some(body) = self.living_body(GuestPid(*last)) else { continue };
            let (first, then) = if *value > 0 { (-1, 1) } else { (1, -1) };
            let changes = [(index, first, 0), (index, then, 0)];
            change(body, set.owner.id, &changes).map_err(GhostError::at(GuestPid(*last)))?;
        }
        Ok(())
    }

    fn use_queue(&self, queue: &SysvQueue) -> GhostResult<()> {
        let sender = self.living_body(queue.last_sender);
        let receiver = self.living_body(queue.last_receiver);
        if sender.is_none() && receiver.is_none() {
            return Ok(());
        }
        let id = queue.owner.id;
        let is_taken = |kind: i64| queue.messages.iter().any(|message| message.kind == kind);
        let Some(kind) = (1..=i64::MAX).rev().find(|kind| !is_taken(*kind)) else { return Ok(()) };
        let namespace = self.namespaces.ipc.as_fd();
        match sender {
            Some(body) => {
                let mut batch = body.batch();
                let message = batch.words(&[kind as u64, 0]);
                batch.may(libc::SYS_msgsnd, &[id as u64, message, 0, NOWAIT]);
                let sent = batch.run().map_err(|error| GhostError::at(body.pid)(error.into()))?;
                if sent.first().is_none_or(|result| *result < 0) {
                    // The queue is full to the last message: its sender stays unknown.
                    return Ok(());
                }
            }
            None => {
                let sent = ipc::inside(namespace, || Ok(kernel_ipc::send_message(id, kind, &[])?));
                if sent.is_err() {
                    return Ok(());
                }
            }
        }
        match receiver {
            Some(body) => {
                let mut batch = body.batch();
                let room = batch.words(&[0, 0]);
                let arguments = [id as u64, room, 8, kind as u64, NOWAIT];
                batch.must("take message", libc::SYS_msgrcv, &arguments);
                batch.run().map_err(|error| GhostError::at(body.pid)(error.into()))?;
            }
            None => ipc::inside(namespace, || Ok(kernel_ipc::take_message(id, kind)?))?,
        }
        Ok(())
    }

    fn use_segment(&self, segment: &SegmentUse) -> GhostResult<()> {
        let Some(body) = self.living_body(segment.last) else { return Ok(()) };
        let mut batch = body.batch();
        let arguments = [segment.id as u64, 0, libc::SHM_RDONLY as u64];
        batch.must("attach segment", libc::SYS_shmat, &arguments);
        batch.then("detach segment", libc::SYS_shmdt);
        batch.run().map_err(|error| GhostError::at(body.pid)(error.into()))?;
        Ok(())
    }
}

fn change(body: &Body, set: i32, changes: &[SemaphoreChange]) -> GhostResult<()> {
    let mut batch = body.batch();
    let at = batch.data(&semaphore_changes(changes));
    let arguments = [set as u64, at, changes.len() as u64, 0];
    batch.must("change semaphore", libc::SYS_semtimedop, &arguments);
    batch.run()?;
    Ok(())
}
