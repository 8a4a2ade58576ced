//! The spare in the path: clients reach the guest through the host that would replace its own.
//!
//! ```text
//!   guest │ primary                 │ stream │ spare                              │ clients
//!   ──────┼─▶ of epoch n ───────────┼────────┼─▶ held ─▶ n is whole here ─────────┼─▶
//!   ◀─────┼──────────────── number ─┼────────┼── log, until a checkpoint covers it ◀─┼──
//! ```
//!
//! Output leaves as soon as this host has the checkpoint: no answer has to travel back. And what
//! clients have said since the last checkpoint is still here when the primary dies, so that nobody
//! has to say it again (RFC 6298: a client would first wait for 200 ms or more). The address does
//! not move.
//!
//! A primary whose packets pass here cannot be heard behind this host's back: [`Relay::end`] fences
//! it.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hotspare_image::Epoch;
use hotspare_kernel::tun::{PACKET_BYTES_MAX, Tun};
use hotspare_replica::StagedCheckpoint;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::gate::{AFTER_ERROR, BATCH, lost_if_failed};
use crate::handshakes::Handshakes;

/// So many bytes wait to leave, and as many are kept of what came; more is lost, as on any network.
const BYTES_MAX: usize = 64 << 20;

/// A packet for the guest, and its number: 1 is the first.
pub type Numbered = (u64, Arc<[u8]>);

/// The way of all packets between clients and a guest that runs elsewhere.
#[derive(Debug)]
pub struct Relay {
    world: Arc<Tun>,
    ledger: Mutex<Ledger>,
    bell: EventFd,
}

/// What waits, and what may be wanted again.
#[derive(Debug, Default)]
struct Ledger {
    /// The last checkpoint that is whole here.
    committed: Epoch,
    output: VecDeque<(Epoch, Box<[u8]>)>,
    output_bytes: usize,
    /// What came and no checkpoint covers.
    log: VecDeque<Numbered>,
    log_bytes: usize,
    /// Packets that came.
    count: u64,
    handshakes: Handshakes,
    is_over: bool,
}

impl Ledger {
    /// Output of an epoch; true if it may leave at once.
    fn output(&mut self, epoch: Epoch, packet: &[u8]) -> bool {
        if self.is_over {
            return false;
        }
        if crate::BROKEN_GATE || epoch <= self.committed && self.output.is_empty() {
            self.handshakes.left(packet);
            return true;
        }
        if self.output_bytes + packet.len() <= BYTES_MAX {
            self.output_bytes += packet.len();
            self.output.push_back((epoch, packet.into()));
        }
        false
    }

    /// The next packet that may leave.
    fn next(&mut self) -> Option<Box<[u8]>> {
        let committed = self.committed;
        let (_, packet) = self.output.pop_front_if(|(epoch, _)| *epoch <= committed)?;
        self.output_bytes -= packet.len();
        self.handshakes.left(&packet);
        Some(packet)
    }

    fn commit(&mut self, epoch: Epoch, inputs: Option<u64>) {
        if self.is_over {
            return;
        }
        self.committed = self.committed.max(epoch);
        let covered = inputs.unwrap_or(0);
        while let Some((_, packet)) = self.log.pop_front_if(|(number, _)| *number <= covered) {
            self.log_bytes -= packet.len();
        }
    }

    /// A packet of a client: it is logged and passed on, or answered at once.
    fn came(&mut self, packet: &[u8]) -> Result<Numbered, Arc<[u8]>> {
        if let Some(answer) = self.handshakes.came(self.count + 1, packet) {
            return Err(answer);
        }
        self.count += 1;
        let came: Numbered = (self.count, packet.into());
        self.log_bytes += packet.len();
        self.log.push_back(came.clone());
        while self.log_bytes > BYTES_MAX
            && let Some((_, oldest)) = self.log.pop_front()
        {
            self.log_bytes -= oldest.len();
        }
        Ok(came)
    }

    fn end(&mut self) -> Said {
        self.is_over = true;
        self.output.clear();
        let handshakes = std::mem::take(&mut self.handshakes);
        let log = std::mem::take(&mut self.log);
        let mut packets = handshakes.unanswered(log.front().map_or(u64::MAX, |(first, _)| *first));
        packets.extend(log.into_iter().map(|(_, packet)| packet));
        Said { packets, handshakes }
    }
}

impl Relay {
    /// A relay through the host's interface `world`; nothing comes in before [`Relay::run`] runs.
    pub fn new(world: Arc<Tun>) -> io::Result<Self> {
        let bell = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        Ok(Self { world, ledger: Mutex::default(), bell })
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes what clients say and has it passed on, until [`Relay::end`]. While `pass_on` waits for
    /// the stream, the interface's queue fills.
    pub fn run(&self, mut pass_on: impl FnMut(&[Numbered])) {
        let mut buffer = vec![0; PACKET_BYTES_MAX];
        let mut batch = Vec::with_capacity(BATCH);
        loop {
            let bell = PollFd::new(self.bell.as_fd(), PollFlags::POLLIN);
            let world = PollFd::new(self.world.as_fd(), PollFlags::POLLIN);
            if poll(&mut [bell, world], PollTimeout::NONE).is_err() {
                continue;
            }
            let taken = {
                let mut ledger = self.ledger();
                if ledger.is_over {
                    return;
                }
                self.take(&mut ledger, &mut buffer, &mut batch)
            };
            if !batch.is_empty() {
                pass_on(&batch);
                batch.clear();
            }
            if taken.is_err() {
                std::thread::sleep(AFTER_ERROR);
            }
        }
    }

    fn take(
        &self,
        ledger: &mut Ledger,
        buffer: &mut [u8],
        batch: &mut Vec<Numbered>,
    ) -> hotspare_kernel::Result<()> {
        while batch.len() < BATCH {
            let Some(length) = self.world.read(buffer)? else { break };
            match ledger.came(&buffer[..length]) {
                Ok(came) => batch.push(came),
                Err(answer) => lost_if_failed(self.world.write(&answer)),
            }
        }
        Ok(())
    }

    /// A packet of the guest, which leaves when the checkpoint of `epoch` is whole here.
    pub fn output(&self, epoch: Epoch, packet: &[u8]) {
        let mut ledger = self.ledger();
        if ledger.output(epoch, packet) {
            lost_if_failed(self.world.write(packet));
        }
    }

    /// This host has the checkpoint, and will use it, whatever happens: its output leaves.
    pub fn commit(&self, checkpoint: &Whole) {
        let mut ledger = self.ledger();
        ledger.commit(checkpoint.epoch, checkpoint.inputs);
        while let Some(packet) = ledger.next() {
            lost_if_failed(self.world.write(&packet));
        }
    }

    /// From here on nothing of that primary leaves. Gives what clients have said since the last
    /// checkpoint that is whole here; what they say next stays in the interface's queue.
    pub fn end(&self) -> Said {
        let mut ledger = self.ledger();
        // Full means that it has rung.
        let _ = self.bell.write(1);
        ledger.end()
    }
}

/// What a guest that goes live here has to know of its clients.
#[derive(Debug, Default)]
pub struct Said {
    /// Packets that it has not had, in order; SYNs that it has had and not answered come first.
    pub packets: Vec<Arc<[u8]>>,
    /// Clients that may not have heard of their connections.
    pub handshakes: Handshakes,
}

/// Says of a checkpoint that this host has all of it, and what it covers.
#[derive(Clone, Copy, Debug)]
pub struct Whole {
    epoch: Epoch,
    inputs: Option<u64>,
}

impl From<&StagedCheckpoint> for Whole {
    fn from(staged: &StagedCheckpoint) -> Self {
        let epoch = staged.committed().position().epoch;
        Self { epoch, inputs: staged.inputs() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left(ledger: &mut Ledger) -> Vec<Box<[u8]>> {
        std::iter::from_fn(|| ledger.next()).collect()
    }

    #[test]
    fn output_leaves_with_its_checkpoint_and_in_order() {
        let mut ledger = Ledger::default();
        assert!(!ledger.output(Epoch(2), b"two"));
        assert!(!ledger.output(Epoch(3), b"three"));
        assert!(left(&mut ledger).is_empty());
        ledger.commit(Epoch(2), None);
        assert!(!ledger.output(Epoch(2), b"late"), "not before what came first");
        assert_eq!(left(&mut ledger), [Box::from(*b"two")]);
        ledger.commit(Epoch(3), None);
        assert_eq!(left(&mut ledger), [Box::from(*b"three"), Box::from(*b"late")]);
        assert!(ledger.output(Epoch(3), b"of a known state"));
        assert_eq!(ledger.output_bytes, 0);
    }

    #[test]
    fn what_a_checkpoint_covers_is_forgotten() {
        let mut ledger = Ledger::default();
        let numbers: Vec<u64> = (0..5u8).map(|byte| ledger.came(&[byte]).unwrap().0).collect();
        assert_eq!(numbers, [1, 2, 3, 4, 5]);
        ledger.commit(Epoch(1), Some(3));
        ledger.commit(Epoch(2), None);
        let kept: Vec<u64> = ledger.log.iter().map(|(number, _)| *number).collect();
        assert_eq!((kept, ledger.log_bytes), (vec![4, 5], 2));
    }

    #[test]
    fn an_old_primary_says_nothing_any_more() {
        let mut ledger = Ledger::default();
        ledger.output(Epoch(2), b"two");
        ledger.came(b"in").unwrap();
        let said = ledger.end();
        ledger.commit(Epoch(2), Some(1));
        assert!(left(&mut ledger).is_empty());
        assert!(!ledger.output(Epoch(1), b"one"));
        assert_eq!(said.packets, [Arc::from(*b"in")], "it is for the ghost");
    }

    #[test]
    fn a_log_that_nobody_covers_is_bounded() {
        let mut ledger = Ledger::default();
        let packet = vec![0; 1 << 20];
        for _ in 0..BYTES_MAX / packet.len() + 3 {
            ledger.came(&packet).unwrap();
        }
        assert_eq!(
            (ledger.log_bytes, ledger.log.front().map(|first| first.0)),
            (BYTES_MAX, Some(4))
        );
    }
}
