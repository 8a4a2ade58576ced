//! A wire that loses, delays, doubles and damages what goes over it. Not every kernel has netem,
//! so a thread of this program carries the frames between two TAP interfaces: `eth0` of a host and
//! its port of the switch.
//!
//! Frames are as large as the kernels hand them over (up to 64 KiB of TCP at once), so what hits
//! one frame hits what real wires carry as a burst.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use hotspare_kernel::tun::{HEADER_BYTES, PACKET_BYTES_MAX, Tun};
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;

use super::lock;
use crate::clock::Instant;
use crate::dice::Dice;
use crate::protected::STREAM_PORT;

/// What a wire does to frames, in both directions. Shares are of all frames, from 0.0 to 1.0.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Weather {
    /// Each frame is so much later.
    pub delay: Duration,
    /// And by up to so much more, without changing the order.
    pub jitter: Duration,
    /// So many are lost.
    pub loss: f64,
    /// So many are overtaken by those of the next milliseconds.
    pub reorder: f64,
    /// So many arrive twice.
    pub duplicate: f64,
    /// In so many frames of the stream between agents a bit is wrong, and the checksum fits: what
    /// a switch with bad memory does.
    pub corrupt: f64,
}

/// For so long a frame is held to be overtaken.
const OVERTAKEN_AFTER: Duration = Duration::from_millis(4);
/// Frames that wait; those above are lost, as in any queue.
const WAITING_MAX: usize = 20_000;
/// Longest sleep of the thread.
const TURN: Duration = Duration::from_millis(20);

/// What wires have done so far.
#[derive(Debug, Default)]
pub struct Done {
    /// Frames that went over it.
    pub carried: AtomicU64,
    /// Those that were held up.
    pub delayed: AtomicU64,
    /// Those that were thrown away.
    pub lost: AtomicU64,
    /// Those that were overtaken.
    pub reordered: AtomicU64,
    /// Those that arrived twice.
    pub duplicated: AtomicU64,
    /// Those with a wrong bit.
    pub corrupted: AtomicU64,
}

/// The two interfaces of a wire.
#[derive(Debug)]
pub(super) struct Ends {
    pub(super) host: Tun,
    pub(super) switch: Tun,
}

#[derive(Debug, Default)]
struct Shared {
    weather: Mutex<Weather>,
    done: Done,
    stop: AtomicBool,
}

/// The wire of one host.
#[derive(Debug, Default)]
pub struct Wire {
    shared: Arc<Shared>,
    carrier: Mutex<Option<JoinHandle<()>>>,
}

impl Wire {
    /// From now on it treats frames like this.
    pub fn set(&self, weather: Weather) {
        *lock(&self.shared.weather) = weather;
    }

    /// How it treats them now.
    pub fn weather(&self) -> Weather {
        *lock(&self.shared.weather)
    }

    /// What it has done so far.
    pub fn done(&self) -> &Done {
        &self.shared.done
    }

    /// Carries frames between these ends, until it is released.
    pub(super) fn carry(&self, ends: Ends) {
        self.release();
        self.shared.stop.store(false, Ordering::Relaxed);
        let shared = Arc::clone(&self.shared);
        let thread = std::thread::spawn(move || Carrier::new(ends, shared).run());
        *lock(&self.carrier) = Some(thread);
    }

    /// Takes both ends away.
    pub(super) fn release(&self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = lock(&self.carrier).take() {
            // Its ends are closed then, however it ended.
            let _ = thread.join();
        }
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.release();
    }
}

/// A frame on its way, ordered by when it arrives.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Waiting {
    due: Instant,
    number: u64,
    to_switch: bool,
    frame: Vec<u8>,
}

struct Carrier {
    ends: Ends,
    shared: Arc<Shared>,
    waiting: BinaryHeap<Reverse<Waiting>>,
    /// When the last frame of each direction arrives that was not picked to be overtaken.
    last: [Instant; 2],
    number: u64,
    dice: Dice,
}

impl Carrier {
    fn new(ends: Ends, shared: Arc<Shared>) -> Carrier {
        let dice = Dice::new(Instant::now().0);
        let last = [Instant::default(); 2];
        Carrier { ends, shared, waiting: BinaryHeap::new(), last, number: 0, dice }
    }

    fn run(mut self) {
        let mut buffer = vec![0; PACKET_BYTES_MAX];
        while !self.shared.stop.load(Ordering::Relaxed) {
            self.wait();
            for to_switch in [true, false] {
                let from = if to_switch { &self.ends.host } else { &self.ends.switch };
                // An end that is down has nothing; it may come up again.
                let mut batch = Vec::new();
                while batch.len() < 256
                    && let Ok(Some(length)) = from.read(&mut buffer)
                {
                    batch.push(buffer[..length].to_vec());
                }
                batch.into_iter().for_each(|frame| self.take(frame, to_switch));
            }
            self.deliver();
        }
    }

    fn wait(&self) {
        let now = Instant::now();
        let due = self.waiting.peek().map(|Reverse(first)| first.due.since(now));
        let timeout = TimeSpec::from_duration(due.unwrap_or(TURN).min(TURN));
        let ends = [&self.ends.host, &self.ends.switch];
        let mut polled = ends.map(|end| PollFd::new(end.as_fd(), PollFlags::POLLIN));
        // Interrupted or not, what is there is looked at.
        let _ = ppoll(&mut polled, Some(timeout), None);
        // An end that is down is ready all the time with nothing to read.
        let is_down = |fd: &PollFd<'_>| {
            fd.revents().is_some_and(|flags| flags.intersects(PollFlags::POLLERR))
        };
        if polled.iter().any(is_down) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn take(&mut self, mut frame: Vec<u8>, to_switch: bool) {
        let weather = *lock(&self.shared.weather);
        let shared = Arc::clone(&self.shared);
        let done = &shared.done;
        count(&done.carried);
        if self.dice.chance(weather.loss) || self.waiting.len() >= WAITING_MAX {
            return count(&done.lost);
        }
        if weather.corrupt > 0.0 && self.dice.chance(weather.corrupt) {
            let at = self.dice.roll();
            if corrupt(&mut frame, at) {
                count(&done.corrupted);
            }
        }
        let now = Instant::now();
        let late = weather.delay + self.dice.between(Duration::ZERO, weather.jitter);
        if !late.is_zero() {
            count(&done.delayed);
        }
        let last = &mut self.last[usize::from(to_switch)];
        let mut due = (now + late).max(*last);
        if self.dice.chance(weather.reorder) {
            count(&done.reordered);
            due = due + OVERTAKEN_AFTER;
        } else {
            *last = due;
        }
        if self.dice.chance(weather.duplicate) {
            count(&done.duplicated);
            self.queue(due, frame.clone(), to_switch);
        }
        self.queue(due, frame, to_switch);
    }

    fn queue(&mut self, due: Instant, frame: Vec<u8>, to_switch: bool) {
        self.number += 1;
        let number = self.number;
        self.waiting.push(Reverse(Waiting { due, number, to_switch, frame }));
    }

    fn deliver(&mut self) {
        let now = Instant::now();
        while self.waiting.peek().is_some_and(|Reverse(first)| first.due <= now) {
            let Some(Reverse(first)) = self.waiting.pop() else { return };
            let to = if first.to_switch { &self.ends.switch } else { &self.ends.host };
            // The kernel refuses frames for an interface that is down, as a cable that is out
            // does.
            let _ = to.write(&first.frame);
        }
    }
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// Turns a bit in what a TCP segment of the stream between agents carries, and makes its checksum
/// fit; false if the frame is no such segment. `at` picks the bit.
fn corrupt(packet: &mut [u8], at: u64) -> bool {
    const ETHERNET_BYTES: usize = 14;
    const NEEDS_CHECKSUM: u8 = 1;
    let partial = packet.first().is_some_and(|flags| flags & NEEDS_CHECKSUM != 0);
    let Some(frame) = packet.get_mut(HEADER_BYTES..) else { return false };
    let is_v4 = frame.get(12..14) == Some(&[0x08, 0x00]);
    let Some(ip) = frame.get_mut(ETHERNET_BYTES..).filter(|_| is_v4) else { return false };
    if ip.len() < 40 || ip[9] != 6 {
        return false;
    }
    let length = usize::from(u16::from_be_bytes([ip[2], ip[3]])).min(ip.len());
    let header = usize::from(ip[0] & 0x0f) * 4;
    let Some(tcp) = ip.get_mut(header..length) else { return false };
    let Some(offset) = tcp.get(12).map(|byte| usize::from(byte >> 4) * 4) else { return false };
    let port = |at: usize| u16::from_be_bytes([tcp[at], tcp[at + 1]]);
    if (port(0) != STREAM_PORT && port(2) != STREAM_PORT) || tcp.len() <= offset {
        return false;
    }
    let byte = offset + (at as usize / 8) % (tcp.len() - offset);
    let before = word(tcp, byte & !1);
    tcp[byte] ^= 1 << (at % 8);
    if !partial {
        // RFC 1624, equation 3.
        let after = word(tcp, byte & !1);
        let sum = u32::from(!word(tcp, 16)) + u32::from(!before) + u32::from(after);
        let sum = (sum & 0xffff) + (sum >> 16);
        let sum = !(((sum & 0xffff) + (sum >> 16)) as u16);
        tcp[16..18].copy_from_slice(&sum.to_be_bytes());
    }
    true
}

/// The 16 bits of a checksum's sum at `at`; what is behind the end counts as zero.
fn word(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes.get(at + 1).copied().unwrap_or(0)])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The one's complement sum of a TCP segment with its pseudo header: 0xffff if it is right.
    fn sum(ip: &[u8]) -> u16 {
        let mut bytes = ip[12..20].to_vec();
        bytes.extend([0, 6]);
        bytes.extend(((ip.len() - 20) as u16).to_be_bytes());
        bytes.extend(&ip[20..]);
        let sum: u32 = (0..bytes.len()).step_by(2).map(|at| u32::from(word(&bytes, at))).sum();
        let sum = (sum & 0xffff) + (sum >> 16);
        (sum & 0xffff) as u16 + (sum >> 16) as u16
    }

    fn segment(port: u16, payload: &[u8]) -> Vec<u8> {
        let mut packet = vec![0; HEADER_BYTES + 14 + 20 + 20];
        packet[HEADER_BYTES + 12..][..2].copy_from_slice(&[8, 0]);
        let ip = HEADER_BYTES + 14;
        packet[ip] = 0x45;
        packet[ip + 2..][..2].copy_from_slice(&(40 + payload.len() as u16).to_be_bytes());
        packet[ip + 9] = 6;
        packet[ip + 12..][..8].copy_from_slice(&[10, 77, 0, 1, 10, 77, 0, 2]);
        packet[ip + 20..][..2].copy_from_slice(&port.to_be_bytes());
        packet[ip + 32] = 0x50;
        packet.extend(payload);
        let checksum = !sum(&packet[ip..]);
        packet[ip + 36..][..2].copy_from_slice(&checksum.to_be_bytes());
        packet
    }

    #[test]
    fn a_bit_is_wrong_and_the_checksum_fits() {
        let ip = HEADER_BYTES + 14;
        for at in 0..500 {
            let good = segment(STREAM_PORT, b"checkpoint 17");
            assert_eq!(sum(&good[ip..]), 0xffff);
            let mut bad = good.clone();
            assert!(corrupt(&mut bad, at));
            assert_eq!(sum(&bad[ip..]), 0xffff, "{at}");
            let wrong = good.iter().zip(&bad).skip(ip + 40);
            let wrong: u32 = wrong.map(|(good, bad)| (good ^ bad).count_ones()).sum();
            assert_eq!(wrong, 1);
        }
        assert!(!corrupt(&mut segment(6379, b"SET"), 3));
        assert!(!corrupt(&mut segment(STREAM_PORT, b""), 3));
        assert!(!corrupt(&mut [0; 30], 3));
    }
}
