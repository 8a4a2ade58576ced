//! The output gate: what leaves the guest waits until a spare knows the state that it came from.
//!
//! ```text
//!   guest namespace │ agent                            │ host
//!   eth0 (TUN) ─────┼─▶ of epoch n ─▶ n is committed ──┼─▶ hsXXXXXX (TUN) ─▶ route, proxy ARP
//!   eth0       ◀────┼──────────────────────────────────┼── hsXXXXXX
//! ```
//!
//! Every packet waits, acknowledgements of TCP too: a client that has an acknowledgement forgets
//! what it sent, so the spare must have that by then (Remus, Cully et al., NSDI 2008, 2.4; NiLiCon
//! the same). Between the stop of the guest and the end of its capture nothing enters, or sockets
//! would change while they are read.
//!
//! With the spare in the path ([`crate::relay`]) the host's end is the spare's: packets go there
//! with the epoch that covers them, and wait there. Here only other spares are waited for.
//!
//! The gate fails closed: both interfaces are this program's, and without it packets go nowhere.
//! Neither does the guest's kernel reset a connection of which nobody reads the packets any more.

use std::collections::VecDeque;
use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use hotspare_image::Epoch;
use hotspare_image::objects::OpenFile;
use hotspare_kernel::segment::{Segment, flag, source};
use hotspare_kernel::tun::{HEADER_BYTES, PACKET_BYTES_MAX, Tun};
use hotspare_replica::Committed;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::company::Company;
use crate::handshakes::{Fate, Handshakes, Threshold, connections, deferring};
use crate::lease::{Lease, boot_ns};
use crate::relay::Said;

/// So many bytes wait at most; then the guest's interface is left full, and its kernel drops
/// packets, as it would before a slow link.
const WAITING_BYTES_MAX: usize = 64 << 20;
/// Packets that are passed on at once, while somebody who wants the gate has to wait.
pub(crate) const BATCH: usize = 32;
/// Packets that have left the guest before a stop, as far as they are told from later ones: the
/// rest waits for the next checkpoint.
const CUT_MAX: usize = 2000;
/// How long an acknowledgement without data may wait for other reasons for a checkpoint: its
/// receiver has a window of data to send before it needs it.
const ACKNOWLEDGEMENT_PATIENCE: Duration = Duration::from_millis(4);
/// After an error that may stay.
pub(crate) const AFTER_ERROR: Duration = Duration::from_millis(10);

/// What the gate has done since it was last asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GateStats {
    /// Packets that were held and let go.
    pub released: u64,
    /// How long the packets of all checkpoints waited, together.
    pub waited: Duration,
    /// The longest of these waits.
    pub waited_max: Duration,
    /// Bytes that wait now.
    pub waiting_bytes: usize,
}

impl GateStats {
    fn count(&mut self, waited: Duration) {
        self.released += 1;
        self.waited += waited;
        self.waited_max = self.waited_max.max(waited);
    }

    /// How long a packet waited, on average.
    pub fn mean(&self) -> Duration {
        self.waited / u32::try_from(self.released.max(1)).unwrap_or(u32::MAX)
    }
}

/// The way of all packets between the guest and the world.
#[derive(Debug)]
pub struct Gate {
    service: IpAddr,
    guest: Tun,
    world: Arc<Tun>,
    hold: Mutex<Hold>,
    bell: EventFd,
    /// Without one, packets leave as long as this program lives.
    lease: OnceLock<Arc<Lease>>,
}

/// Takes packets to the spare in the path, each with the checkpoint that covers it.
pub type Outlet = Box<dyn Fn(Epoch, &[u8]) + Send>;

/// What waits, and for what.
#[derive(Default)]
struct Hold {
    /// What leaves the guest now is covered by this checkpoint.
    epoch: Epoch,
    /// Everything up to here may leave, if output waits at all.
    committed: Epoch,
    /// Somebody is waited for, besides the spare in the path.
    is_withheld: bool,
    /// When the guest was stopped for checkpoints that are not committed yet.
    cuts: VecDeque<(Epoch, u64)>,
    /// Where packets go instead of the host's interface.
    outlet: Option<Outlet>,
    /// Packets that have gone there.
    passed: VecDeque<Passed>,
    /// The last packet of the spare in the path that has entered the guest.
    inputs: u64,
    /// Such packets that wait until they may enter.
    pending: VecDeque<(u64, Vec<u8>)>,
    pending_bytes: usize,
    /// With a spare in the path: connections that no checkpoint has yet.
    threshold: Threshold,
    /// What is to be said to the guest in their clients' names.
    answers: Vec<Vec<u8>>,
    handshakes: Handshakes,
    waiting: VecDeque<Waiting>,
    bytes: usize,
    /// Output waits; otherwise nobody could take over, and it leaves at once.
    is_closed: bool,
    /// Nothing enters the guest.
    is_shut: bool,
    is_over: bool,
    /// When those that no checkpoint covers yet want one.
    wanted: Option<Instant>,
    /// Who may be waited for before that.
    company: Company,
    stats: GateStats,
    buffer: Vec<u8>,
}

#[derive(Debug)]
struct Waiting {
    epoch: Epoch,
    since: Instant,
    /// It is not only an acknowledgement.
    speaks: bool,
    packet: Box<[u8]>,
}

/// A packet that has gone to the spare in the path.
#[derive(Debug)]
struct Passed {
    epoch: Epoch,
    since: Instant,
    speaks: bool,
}

impl std::fmt::Debug for Hold {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut told = f.debug_struct("Hold");
        told.field("epoch", &self.epoch).field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl Hold {
    fn add(&mut self, packet: &[u8], now: Instant) {
        let patience = patience(packet);
        self.want(now + patience);
        let speaks = patience.is_zero();
        if speaks {
            self.company.sent();
        }
        self.bytes += packet.len();
        let (epoch, packet) = (self.epoch, packet.into());
        self.waiting.push_back(Waiting { epoch, since: now, speaks, packet });
    }

    /// From now on packets belong to the checkpoint after this one.
    fn cut(&mut self, epoch: Epoch) {
        self.epoch = epoch.next();
        self.wanted = None;
        self.company.cut();
        self.cuts.push_back((epoch, boot_ns()));
    }

    /// When the guest was stopped for the last of these checkpoints.
    fn cut_at(&mut self, committed: Epoch) -> Option<u64> {
        let mut last = None;
        while let Some((_, at)) = self.cuts.pop_front_if(|(epoch, _)| *epoch <= committed) {
            last = Some(at);
        }
        last
    }

    /// Everything up to here may leave.
    fn limit(&self) -> Epoch {
        let only_path = self.outlet.is_some() && !self.is_withheld;
        let waits_for_nobody = !self.is_closed || only_path || crate::BROKEN_GATE;
        if waits_for_nobody { Epoch(u64::MAX) } else { self.committed }
    }

    /// There is no checkpoint of this epoch yet after all.
    fn undo_cut(&mut self, epoch: Epoch, now: Instant) {
        self.epoch = epoch;
        self.cuts.pop_back();
        for waiting in self.waiting.iter_mut().rev() {
            if waiting.epoch <= epoch {
                break;
            }
            waiting.epoch = epoch;
        }
        if !self.waiting.is_empty() || !self.threshold.is_empty() {
            self.wanted = Some(now);
        }
    }

    /// From when on a checkpoint is due for what no one covers.
    fn due(&self) -> Option<Instant> {
        let wanted = self.wanted.filter(|_| self.is_closed)?;
        Some(self.company.until().map_or(wanted, |until| wanted.max(until)))
    }

    fn want(&mut self, at: Instant) {
        self.wanted = Some(self.wanted.map_or(at, |before| before.min(at)));
    }

    fn add_all(&mut self, packets: Vec<Box<[u8]>>, now: Instant) {
        packets.iter().for_each(|packet| self.add(packet, now));
    }

    /// A packet has left the guest and is to be held.
    fn left(&mut self, packet: &[u8], now: Instant) {
        match self.threshold.leaves(packet, now) {
            Fate::Passes => self.add(packet, now),
            Fate::Kept => {}
            Fate::Answered(answer) => {
                self.answers.push(answer);
                if let Some(at) = self.threshold.wants(now) {
                    self.want(at);
                }
            }
            Fate::Releases(earlier) => {
                self.add_all(earlier, now);
                self.add(packet, now);
            }
        }
    }

    /// A packet is about to enter the guest; false if it must not.
    fn enters(&mut self, number: u64, packet: &[u8]) -> bool {
        if self.outlet.is_none() && self.handshakes.is_empty() {
            return true;
        }
        if let Some(answer) = self.handshakes.came(number, packet) {
            self.add(&answer, Instant::now());
            return false;
        }
        self.outlet.is_none() || self.threshold.enters(packet, || self.handshakes.has_room())
    }

    /// The next packet that may leave, and what covers it.
    fn next(&mut self, now: Instant) -> Option<(Epoch, Box<[u8]>)> {
        if self.outlet.is_some() && self.is_shut {
            // It is not known yet which checkpoint covers it.
            return None;
        }
        let limit = self.limit();
        let first = self.waiting.pop_front_if(|first| first.epoch <= limit)?;
        let Waiting { epoch, since, speaks, packet } = first;
        self.bytes -= packet.len();
        match self.outlet {
            // It goes on waiting there.
            Some(_) => self.passed.push_back(Passed { epoch, since, speaks }),
            None => self.arrives(since, speaks, now),
        }
        Some((epoch, packet))
    }

    /// A packet is on its way to its receiver.
    fn arrives(&mut self, since: Instant, speaks: bool, now: Instant) {
        self.stats.count(now.saturating_duration_since(since));
        if speaks {
            self.company.answered(now);
        }
    }

    /// The spare in the path has everything up to here: what waited there has left.
    fn has_left(&mut self, committed: Epoch, now: Instant) {
        while let Some(passed) = self.passed.pop_front_if(|passed| passed.epoch <= committed) {
            self.arrives(passed.since, passed.speaks, now);
        }
    }
}

/// How long a packet, with its header, can do without a checkpoint of its own.
fn patience(packet: &[u8]) -> Duration {
    let segment = packet.get(HEADER_BYTES..).and_then(Segment::from_packet);
    let says_something = |segment: &Segment| {
        segment.payload_bytes > 0 || segment.flags & (flag::SYN | flag::FIN | flag::RST) != 0
    };
    match segment {
        Some(segment) if !says_something(&segment) => ACKNOWLEDGEMENT_PATIENCE,
        _ => Duration::ZERO,
    }
}

impl Gate {
    /// A gate between the guest's interface and the host's; open, and nothing passes before
    /// [`Gate::run`] runs. Only packets from `service` ever leave.
    pub fn new(service: IpAddr, guest: Tun, world: Tun) -> io::Result<Self> {
        let bell = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let hold = Hold { buffer: vec![0; PACKET_BYTES_MAX], ..Hold::default() };
        let (hold, lease) = (Mutex::new(hold), OnceLock::new());
        Ok(Self { service, guest, world: Arc::new(world), hold, bell, lease })
    }

    /// From now on packets leave only while this lease lasts.
    pub fn bind(&self, lease: Arc<Lease>) {
        // Whoever has one keeps it.
        let _ = self.lease.set(lease);
    }

    /// Whether a packet may leave at this instant. Commits take heirs into account; where nothing
    /// waits for them, heirs that could take the term at once have to be struck out first.
    fn may_leave(&self, hold: &Hold) -> bool {
        let Some(lease) = self.lease.get() else { return true };
        lease.holds() && (hold.is_closed || !lease.heirs().are_awaited())
    }

    fn hold(&self) -> MutexGuard<'_, Hold> {
        self.hold.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ring(&self) {
        // Full means that it has rung.
        let _ = self.bell.write(1);
    }

    /// The host's interface.
    pub fn world(&self) -> Arc<Tun> {
        Arc::clone(&self.world)
    }

    /// Passes packets until [`Gate::end`]. `wake` is called when [`Gate::wanted`] has become
    /// earlier.
    pub fn run(&self, wake: impl Fn()) {
        loop {
            let (reads_guest, reads_world) = {
                let hold = self.hold();
                if hold.is_over {
                    return;
                }
                (hold.bytes < WAITING_BYTES_MAX, !hold.is_shut)
            };
            let mut polled = vec![PollFd::new(self.bell.as_fd(), PollFlags::POLLIN)];
            if reads_guest {
                polled.push(PollFd::new(self.guest.as_fd(), PollFlags::POLLIN));
            }
            if reads_world {
                polled.push(PollFd::new(self.world.as_fd(), PollFlags::POLLIN));
            }
            if poll(&mut polled, PollTimeout::NONE).is_err() {
                continue;
            }
            let _ = self.bell.read();
            let mut hold = self.hold();
            let before = (hold.wanted, hold.company.until());
            let out = self.pass_out(&mut hold, BATCH);
            let sooner = |now: Instant| before.0.is_none_or(|before| now < before);
            let complete = before.1.is_some() && hold.company.until().is_none();
            let wanted = hold.is_closed && hold.wanted.is_some_and(|now| sooner(now) || complete);
            drop(hold);
            if wanted {
                wake();
            }
            if out.and_then(|()| self.pass_in()).is_err() {
                std::thread::sleep(AFTER_ERROR);
            }
        }
    }

    /// Takes what has left the guest, and lets it go if nothing is held.
    fn pass_out(&self, hold: &mut Hold, most: usize) -> hotspare_kernel::Result<()> {
        let mut buffer = std::mem::take(&mut hold.buffer);
        let mut taken = Ok(());
        for _ in 0..most {
            if hold.bytes >= WAITING_BYTES_MAX {
                break;
            }
            let length = match self.guest.read(&mut buffer) {
                Ok(Some(length)) => length,
                Ok(None) => break,
                Err(error) => {
                    taken = Err(error);
                    break;
                }
            };
            let packet = &buffer[..length];
            if packet.get(HEADER_BYTES..).and_then(source) != Some(self.service) {
                continue;
            }
            if hold.is_closed || !hold.waiting.is_empty() || !self.may_leave(hold) {
                hold.left(packet, Instant::now());
            } else {
                lost_if_failed(self.world.write(packet));
            }
        }
        hold.buffer = buffer;
        self.answer(hold);
        self.let_go(hold);
        taken
    }

    fn pass_in(&self) -> hotspare_kernel::Result<()> {
        let mut hold = self.hold();
        let mut buffer = std::mem::take(&mut hold.buffer);
        let mut taken = Ok(());
        for _ in 0..BATCH {
            if hold.is_shut {
                break;
            }
            match self.world.read(&mut buffer) {
                Ok(Some(length)) if hold.enters(0, &buffer[..length]) => {
                    lost_if_failed(self.guest.write(&buffer[..length]));
                }
                Ok(Some(_)) => {}
                Ok(None) => break,
                Err(error) => {
                    taken = Err(error);
                    break;
                }
            }
        }
        hold.buffer = buffer;
        taken
    }

    /// Lets go whatever may leave. The lease is looked at before each packet: this thread may have
    /// stood still since the last.
    fn let_go(&self, hold: &mut Hold) {
        let (was_full, now) = (hold.bytes >= WAITING_BYTES_MAX, Instant::now());
        while self.may_leave(hold)
            && let Some((epoch, packet)) = hold.next(now)
        {
            if !hold.handshakes.is_empty() {
                hold.handshakes.left(&packet);
            }
            match &hold.outlet {
                Some(outlet) => outlet(epoch, &packet),
                None => lost_if_failed(self.world.write(&packet)),
            }
        }
        if was_full {
            self.ring();
        }
    }

    /// Packets for the guest that came to the spare in the path are numbered from 1 on now.
    pub fn begin_inputs(&self) {
        let mut hold = self.hold();
        hold.inputs = 0;
        hold.pending.clear();
        hold.pending_bytes = 0;
    }

    /// A packet for the guest that came to the spare in the path.
    pub fn input(&self, number: u64, packet: Vec<u8>) {
        let mut hold = self.hold();
        if !hold.is_shut {
            self.enter(&mut hold, number, &packet);
        } else if hold.pending_bytes + packet.len() <= WAITING_BYTES_MAX {
            hold.pending_bytes += packet.len();
            hold.pending.push_back((number, packet));
        }
    }

    /// A packet for the guest, from `service`'s clients or nobody.
    fn enter(&self, hold: &mut Hold, number: u64, packet: &[u8]) {
        hold.inputs = number;
        if hold.enters(number, packet) {
            lost_if_failed(self.guest.write(packet));
        }
    }

    /// Says to the guest what its clients will, unless it is being looked at.
    fn answer(&self, hold: &mut Hold) {
        if !hold.is_shut {
            hold.answers.drain(..).for_each(|answer| lost_if_failed(self.guest.write(&answer)));
        }
    }

    /// Checkpoint `epoch` has these files: connections among them may be known to their clients.
    /// To be called before the checkpoint can be whole anywhere, and before anything leaves that
    /// only the next one covers: no ghost may have a connection whose SYN-ACK died with the
    /// primary. So these wait for the spare in the path only.
    pub fn covered(&self, epoch: Epoch, files: &[OpenFile]) {
        let mut hold = self.hold();
        if hold.threshold.is_empty() {
            return;
        }
        hold.threshold.set_deferring(deferring(files));
        for packet in hold.threshold.covered(connections(files)) {
            hold.handshakes.left(&packet);
            match &hold.outlet {
                Some(outlet) => outlet(epoch, &packet),
                None => hold.add(&packet, Instant::now()),
            }
        }
        let now = Instant::now();
        let given_up = hold.threshold.give_up(Some(now));
        hold.add_all(given_up, now);
        if let Some(at) = hold.threshold.wants(now) {
            hold.want(at);
        }
        self.let_go(&mut hold);
        drop(hold);
        self.ring();
    }

    /// What this host's own relay has kept for the guest.
    pub fn enter_late(&self, said: Said) {
        let mut hold = self.hold();
        hold.handshakes = said.handshakes;
        for packet in said.packets {
            lost_if_failed(self.guest.write(&packet));
        }
    }

    /// Nothing enters until [`Gate::let_in`].
    pub fn shut(&self) {
        self.hold().is_shut = true;
    }

    /// From now on packets leave through a spare; or, with `None`, here again, and everything waits
    /// for the next [`Gate::commit`].
    pub fn lead_through(&self, outlet: Option<Outlet>) {
        let mut hold = self.hold();
        hold.passed.clear();
        if outlet.is_none() {
            let pending = hold.threshold.give_up(None);
            hold.add_all(pending, Instant::now());
        }
        hold.outlet = outlet;
        self.let_go(&mut hold);
    }

    /// The guest stands still for checkpoint `epoch`: what has left it so far belongs to that, what
    /// leaves later to the next. Nothing enters it until [`Gate::let_in`]. With `close`, output
    /// waits from here on, since whoever has this checkpoint can take over. Gives the last packet
    /// of the spare in the path that the guest has had.
    pub fn cut(&self, epoch: Epoch, close: bool) -> u64 {
        let mut hold = self.hold();
        hold.is_shut = true;
        if let Err(error) = self.pass_out(&mut hold, CUT_MAX) {
            tracing::debug!(%error, "what left the guest could not be read");
        }
        hold.is_closed |= close;
        hold.cut(epoch);
        hold.inputs
    }

    /// There is no checkpoint `epoch` yet: the guest goes on, and is to be stopped again.
    pub fn undo_cut(&self, epoch: Epoch) {
        self.hold().undo_cut(epoch, Instant::now());
        self.let_in();
    }

    /// The guest goes on: packets enter it again.
    pub fn let_in(&self) {
        let mut hold = self.hold();
        hold.is_shut = false;
        while let Some((number, packet)) = hold.pending.pop_front() {
            hold.pending_bytes -= packet.len();
            self.enter(&mut hold, number, &packet);
        }
        if hold.outlet.is_some() {
            self.answer(&mut hold);
            self.let_go(&mut hold);
        }
        drop(hold);
        self.ring();
    }

    /// Whoever could take over has everything up to a checkpoint. Its output leaves: that of
    /// `waited_for`, which is all of them without the spare in the path, or `None` if there is no
    /// other. With `extends` they are all that could, and nobody else has the guest when they
    /// acknowledge: that holds the lease up.
    pub fn commit(&self, all: Committed, waited_for: Option<Committed>, extends: bool) {
        let mut hold = self.hold();
        hold.has_left(all.position().epoch, Instant::now());
        let proof = waited_for.unwrap_or(all).position().epoch;
        hold.committed = hold.committed.max(proof);
        hold.is_withheld = waited_for.is_some();
        if let Some(at) = hold.cut_at(all.position().epoch)
            && let Some(lease) = self.lease.get().filter(|_| extends)
        {
            lease.extend_from(at);
        }
        self.let_go(&mut hold);
    }

    /// Somebody else is to be waited for, who has nothing yet.
    pub fn withhold(&self) {
        self.hold().is_withheld = true;
    }

    /// How much clients may have seen by now. More leaves only when somebody who is waited for from
    /// now on has it, too.
    pub fn shown(&self) -> Epoch {
        let hold = self.hold();
        // Where nobody here holds it, and what the spare in the path may let go.
        let leaves = !hold.is_closed || hold.outlet.is_some();
        if leaves { hold.epoch } else { hold.committed }
    }

    /// The lease is renewed: what had to wait for that leaves.
    pub fn renewed(&self) {
        self.let_go(&mut self.hold());
    }

    /// Nobody could take over: everything leaves, at once from now on.
    pub fn open(&self) {
        let mut hold = self.hold();
        hold.is_closed = false;
        hold.outlet = None;
        hold.passed.clear();
        let given_up = hold.threshold.give_up(None);
        hold.add_all(given_up, Instant::now());
        self.let_go(&mut hold);
        hold.wanted = None;
        if let Err(error) = self.pass_out(&mut hold, CUT_MAX) {
            tracing::debug!(%error, "what left the guest could not be read");
        }
        drop(hold);
        self.ring();
    }

    /// Whether output is held.
    pub fn is_closed(&self) -> bool {
        self.hold().is_closed
    }

    /// Bytes that wait.
    pub fn waiting_bytes(&self) -> usize {
        self.hold().bytes
    }

    /// Since when, or from when on, output that no checkpoint covers waits for one: it may wait for
    /// others first, see the module `company`.
    pub fn wanted(&self) -> Option<Instant> {
        self.hold().due()
    }

    /// What it has done since this was last asked.
    pub fn take_stats(&self) -> GateStats {
        let mut hold = self.hold();
        let stats = std::mem::take(&mut hold.stats);
        GateStats { waiting_bytes: hold.bytes, ..stats }
    }

    /// Ends [`Gate::run`]; nothing passes any more.
    pub fn end(&self) {
        self.hold().is_over = true;
        self.ring();
    }
}

/// Any network may lose packets.
pub(crate) fn lost_if_failed(written: hotspare_kernel::Result<()>) {
    if let Err(error) = written {
        tracing::debug!(%error, "a packet is lost");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_micros(1);

    fn packet(flags: u8, payload: &[u8]) -> Vec<u8> {
        let segment = Segment {
            from: "10.0.0.50:80".parse().unwrap(),
            to: "10.0.0.9:4000".parse().unwrap(),
            sequence: 1,
            acknowledgement: 1,
            flags,
            window: 100,
            payload_bytes: 0,
        };
        let mut packet = segment.to_packet().unwrap();
        packet.extend(payload);
        let length = (packet.len() as u16).to_be_bytes();
        packet[2..4].copy_from_slice(&length);
        [&[0; HEADER_BYTES][..], &packet].concat()
    }

    fn leaves(hold: &mut Hold, committed: u64, now: Instant) -> Vec<Vec<u8>> {
        (hold.is_closed, hold.committed) = (true, Epoch(committed));
        let mut left = Vec::new();
        while let Some((_, packet)) = hold.next(now) {
            left.push(packet.into_vec());
        }
        left
    }

    #[test]
    fn a_packet_leaves_with_the_first_checkpoint_that_covers_it_and_in_order() {
        let now = Instant::now();
        let [one, two, three] = [b"1", b"2", b"3"].map(|text| packet(flag::ACK, text));
        let mut hold = Hold { epoch: Epoch(4), ..Hold::default() };
        hold.add(&one, now);
        hold.cut(Epoch(4));
        hold.add(&two, now);
        hold.add(&three, now);
        assert_eq!(leaves(&mut hold, 3, now), Vec::<Vec<u8>>::new());
        assert_eq!(leaves(&mut hold, 4, now + SHORT), [one]);
        hold.cut(Epoch(5));
        assert_eq!(leaves(&mut hold, 5, now + SHORT), [two, three]);
        assert_eq!(hold.bytes, 0);
        assert_eq!(hold.stats.released, 3);
        assert_eq!(hold.stats.waited_max, SHORT);
    }

    #[test]
    fn output_wants_a_checkpoint_and_a_cut_answers_the_want() {
        let now = Instant::now();
        let mut hold = Hold::default();
        hold.add(&packet(flag::ACK, b""), now);
        assert_eq!(hold.wanted, Some(now + ACKNOWLEDGEMENT_PATIENCE));
        hold.add(&packet(flag::ACK, b"a reply"), now);
        assert_eq!(hold.wanted, Some(now));
        hold.add(&packet(flag::ACK, b""), now);
        assert_eq!(hold.wanted, Some(now));
        hold.cut(Epoch(1));
        assert_eq!(hold.wanted, None);
        for flags in [flag::SYN | flag::ACK, flag::FIN | flag::ACK, flag::RST] {
            assert_eq!(patience(&packet(flags, b"")), Duration::ZERO, "{flags}");
        }
    }

    /// Two clients, one a checkpoint behind the other, are covered by one checkpoint from then on.
    #[test]
    fn a_reply_waits_for_that_to_another_client_who_has_just_been_answered() {
        let now = Instant::now();
        let reply = packet(flag::ACK, b"a reply");
        for has_path in [false, true] {
            let outlet: Option<Outlet> = has_path.then_some(Box::new(|_, _| {}));
            let mut hold = Hold { epoch: Epoch(1), is_closed: true, outlet, ..Hold::default() };
            hold.add(&reply, now);
            assert_eq!(hold.due(), Some(now), "alone");
            hold.cut(Epoch(1));
            hold.add(&reply, now);
            assert_eq!(hold.due(), Some(now), "nobody has been answered yet");
            hold.committed = Epoch(1);
            while hold.next(now).is_some() {}
            hold.has_left(Epoch(1), now);
            assert!(hold.due() > Some(now), "the one who was answered may ask again");
            hold.add(&packet(flag::ACK, b""), now);
            assert!(hold.due() > Some(now), "he has not");
            hold.add(&reply, now);
            assert_eq!(hold.due(), Some(now));
            hold.cut(Epoch(2));
            assert_eq!(hold.due(), None);
        }
    }

    #[test]
    fn a_stop_that_came_to_nothing_counts_as_none() {
        let now = Instant::now();
        let [one, two] = [b"1", b"2"].map(|text| packet(flag::ACK, text));
        let mut hold = Hold { epoch: Epoch(7), ..Hold::default() };
        hold.add(&one, now);
        hold.cut(Epoch(7));
        hold.add(&two, now);
        hold.undo_cut(Epoch(7), now);
        assert_eq!(hold.wanted, Some(now));
        assert_eq!(leaves(&mut hold, 6, now), Vec::<Vec<u8>>::new());
        hold.cut(Epoch(7));
        assert_eq!(leaves(&mut hold, 7, now), [one, two]);
    }

    #[test]
    fn what_leaves_through_a_spare_waits_for_the_end_of_a_stop_only() {
        let now = Instant::now();
        let [one, two] = [b"1", b"2"].map(|text| packet(flag::ACK, text));
        let outlet: Outlet = Box::new(|_, _| {});
        let mut hold = Hold { epoch: Epoch(7), outlet: Some(outlet), ..Hold::default() };
        hold.is_shut = true;
        hold.add(&one, now);
        hold.cut(Epoch(7));
        hold.add(&two, now);
        assert_eq!(leaves(&mut hold, u64::MAX, now), Vec::<Vec<u8>>::new());
        hold.undo_cut(Epoch(7), now);
        hold.is_shut = false;
        let (epochs, left): (Vec<Epoch>, Vec<_>) = std::iter::from_fn(|| hold.next(now)).unzip();
        assert_eq!(epochs, [Epoch(7), Epoch(7)]);
        assert_eq!(left, [one.into(), two.into()] as [Box<[u8]>; 2]);
        assert_eq!(hold.stats.released, 0, "they wait there");
        hold.has_left(Epoch(6), now);
        assert_eq!(hold.stats.released, 0);
        hold.has_left(Epoch(7), now + SHORT);
        assert_eq!((hold.stats.released, hold.stats.waited_max), (2, SHORT));
    }
}
