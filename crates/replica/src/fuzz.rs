//! Long runs of the decoder on damaged streams, in stable Rust: `cargo xtask fuzz`.
//!
//! Streams are made by the real sender from a seed, then damaged. Some damage leaves checksums
//! wrong (they must be noticed), some has its checksums made right again (it must be survived).

pub mod images;
pub mod peers;

use std::collections::HashSet;
use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hotspare_image::files::FileIdentity;
use hotspare_image::memory::{MmId, PageOwner, SharedId};
use hotspare_image::{Epoch, Position, Term};
use xxhash_rust::xxh3::xxh3_64;

use crate::bases::PAGE;
use crate::frame::{FLAG_REMEMBER, FrameBuffer, FrameError, FrameReader, HEADER_BYTES, Kind};
use crate::message::{
    CheckpointBegin, CheckpointEnd, GoodbyeCode, Hello, MemberEntry, Refuse, SwitchoverOffer,
    Welcome, open, open_packet,
};
use crate::pages::{Content, PageRun};
use crate::receiver::{Incoming, Receiver};
use crate::sender::{Compression, PageBatch, Sender, sender};
use crate::staging::StagingLimits;
use crate::{Goodbye, HostFacts};

/// SplitMix64 (Steele, Lea, Flood 2014).
#[derive(Clone, Debug)]
pub struct Dice(pub u64);

impl Dice {
    /// The next 64 bits.
    pub fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `limit`, which is not zero.
    pub fn below(&mut self, limit: usize) -> usize {
        (self.roll() % limit as u64) as usize
    }

    /// So many bytes.
    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count.div_ceil(8)).flat_map(|_| self.roll().to_le_bytes()).take(count).collect()
    }
}

/// Memory shared by a [`Writer`](crate::Writer) and whoever wants its bytes.
#[derive(Clone, Debug, Default)]
pub struct SharedBytes(Arc<Mutex<Vec<u8>>>);

impl SharedBytes {
    /// What was written so far.
    #[must_use]
    pub fn take(&self) -> Vec<u8> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Write for SharedBytes {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The bytes a primary would send for what `queue` asks of it.
pub fn bytes_of(compression: Compression, queue: impl FnOnce(&Sender)) -> Vec<u8> {
    let written = SharedBytes::default();
    let parts = sender(written.clone(), io::empty(), usize::MAX, compression);
    let (sender, writer, _) = parts;
    queue(&sender);
    drop(sender);
    match writer.run() {
        Ok(()) => written.take(),
        Err(never) => unreachable!("writing to memory cannot fail: {never}"),
    }
}

/// A valid stream: a few checkpoints with all sorts of pages, some void, and messages between.
#[must_use]
pub fn stream(seed: u64) -> Vec<u8> {
    let mut dice = Dice(seed);
    let compression = [Compression::Off, Compression::Always][dice.below(2)];
    bytes_of(compression, |sender| {
        // Nothing breaks in memory; a refusal would show as a short stream.
        let _ = queue_checkpoints(sender, &mut dice);
    })
}

fn queue_checkpoints(sender: &Sender, dice: &mut Dice) -> Result<(), crate::Broken> {
    let members = [MemberEntry {
        node: hotspare_image::NodeId(dice.roll()),
        rank: 1,
        ready: true,
        heart: "10.0.0.2:7000".into(),
        listens: None,
        stands_by: Some(false),
    }];
    for epoch in 1..2 + dice.below(3) as u64 {
        let position = Position::checkpoint(Epoch(epoch));
        sender.begin(position, Term(1), epoch == 1)?;
        if dice.below(3) == 0 {
            // What stands in the path of packets, and what is told of connections.
            let packet = dice.bytes(60);
            sender.packets().output(Epoch(epoch), &packet);
            sender.packet(Arc::new(packet))?;
            sender.open_path()?;
        }
        for _ in 0..dice.below(4) {
            sender.pages(Arc::new(batch(dice)))?;
        }
        let run = PageRun { first: dice.below(64) as u64 * PAGE as u64, pages: 9 };
        sender.zero_runs(PageOwner::Shared(SharedId(dice.roll())), Arc::new(vec![run]))?;
        let run = PageRun { first: dice.below(16) as u64 * PAGE as u64, pages: 3 };
        let owner = PageOwner::Mm(MmId(dice.below(2) as u32));
        sender.discard_runs(owner, Arc::new(vec![run]))?;
        for _ in 0..dice.below(3) {
            sender.pages(Arc::new(batch(dice)))?;
        }
        if dice.below(5) == 0 {
            sender.abort(position)?;
            continue;
        }
        let (state, files) = (dice.below(3000), dice.below(3000));
        sender.state(Arc::new(dice.bytes(state)))?;
        sender.members(&members)?;
        sender.files(&[file(dice), file(dice)])?;
        sender.file_changes(Arc::new(dice.bytes(files)))?;
        sender.end(position, (dice.below(2) == 0).then(|| dice.roll()))?;
    }
    sender.offer_switchover(SwitchoverOffer { term: Term(2), position: Position::default() })?;
    sender.guest_died()?;
    sender.goodbye(&Goodbye { code: GoodbyeCode::Stopped, text: "done".into() })
}

fn file(dice: &mut Dice) -> FileIdentity {
    let length = dice.below(40);
    let mut blake3 = [0; 32];
    blake3.copy_from_slice(&dice.bytes(32));
    FileIdentity { path: dice.bytes(length), size_bytes: dice.roll(), mode: 0o100_644, blake3 }
}

fn batch(dice: &mut Dice) -> PageBatch {
    let owner = PageOwner::Mm(MmId(dice.below(2) as u32));
    let runs: Vec<PageRun> = (0..1 + dice.below(3))
        .map(|_| PageRun {
            first: dice.below(16) as u64 * PAGE as u64,
            pages: 1 + dice.below(5) as u32,
        })
        .collect();
    let pages: u32 = runs.iter().map(|run| run.pages).sum();
    let bytes = (0..pages).flat_map(|_| match dice.below(4) {
        0 => vec![0; PAGE],
        1 => dice.bytes(PAGE),
        2 => vec![dice.roll() as u8; PAGE],
        _ => {
            let mut page = vec![7; PAGE];
            page[dice.below(PAGE)] = dice.roll() as u8;
            page
        }
    });
    let bytes = bytes.collect();
    match PageBatch::new(owner, runs, bytes) {
        Some(batch) => batch,
        None => unreachable!("lengths agree by construction"),
    }
}

/// What a receiver makes of a stream: a digest of every committed checkpoint, and how it ended.
#[must_use]
pub fn receive(bytes: &[u8]) -> (Vec<u64>, Option<FrameError>) {
    let mut receiver = Receiver::new(bytes, StagingLimits::default());
    let mut committed = Vec::new();
    loop {
        match receiver.next() {
            Ok(Incoming::Checkpoint(mut checkpoint)) => {
                let mut digest = xxh3_64(checkpoint.state());
                let mut add = |bytes: &[u8]| digest = digest.rotate_left(5) ^ xxh3_64(bytes);
                add(&checkpoint.position().epoch.0.to_le_bytes());
                let runs = checkpoint.for_each_run(|owner, address, content| {
                    add(format!("{owner:?} {address}").as_bytes());
                    match content {
                        Content::Zero(pages) => add(&pages.to_le_bytes()),
                        Content::Discard(pages) => add(format!("discard {pages}").as_bytes()),
                        Content::Bytes(bytes) => add(bytes),
                    }
                    Ok::<(), io::Error>(())
                });
                let mut files = Vec::new();
                let read = io::Read::read_to_end(checkpoint.files(), &mut files);
                digest = digest.rotate_left(5) ^ xxh3_64(&files);
                if let Err(error) = runs.and(read.map(drop)) {
                    return (committed, Some(error.into()));
                }
                committed.push(digest);
            }
            Ok(Incoming::Goodbye(_)) => return (committed, None),
            Ok(_) => {}
            Err(error) => return (committed, Some(error)),
        }
    }
}

/// Splits a valid stream at its frames.
fn split(mut bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut frames = Vec::new();
    while let Some(head) = bytes.first_chunk::<HEADER_BYTES>() {
        let length = u32::from_le_bytes([head[8], head[9], head[10], head[11]]) as usize;
        let (frame, rest) = bytes.split_at((HEADER_BYTES + length).min(bytes.len()));
        frames.push(frame.to_vec());
        bytes = rest;
    }
    frames
}

/// Makes the checksum of a changed frame right.
fn reseal(frame: &mut Vec<u8>) {
    let kind = Kind::from_number(u16::from_le_bytes([frame[4], frame[5]]));
    let mut buffer = FrameBuffer::default();
    buffer.extend(&frame[HEADER_BYTES..]);
    let kind = kind.unwrap_or(Kind::State);
    let flags = if kind == Kind::Pages { u16::from(frame[6]) & FLAG_REMEMBER } else { 0 };
    *frame = buffer.seal(kind, flags).to_vec();
}

/// Changes, cuts or repeats some of them.
pub fn damage(bytes: &mut Vec<u8>, dice: &mut Dice) {
    if bytes.is_empty() {
        return;
    }
    let at = dice.below(bytes.len());
    match dice.below(6) {
        0 => bytes[at] ^= 1 << dice.below(8),
        1 => bytes[at] = [0, 1, 0x7f, 0x80, 0xff][dice.below(5)],
        2 => bytes.truncate(at),
        3 => {
            let end = (at + 1 + dice.below(64)).min(bytes.len());
            let piece = bytes[at..end].to_vec();
            let to = dice.below(bytes.len());
            bytes.splice(to..to, piece);
        }
        4 => {
            let end = (at + 1 + dice.below(64)).min(bytes.len());
            bytes.drain(at..end);
        }
        _ => {
            let noise = dice.roll().to_le_bytes();
            let end = (at + noise.len()).min(bytes.len());
            bytes[at..end].copy_from_slice(&noise[..end - at]);
        }
    }
}

/// How many streams were tried and what became of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FuzzReport {
    /// Damaged streams.
    pub cases: u64,
    /// Of these, how many were refused.
    pub refused: u64,
    /// Checkpoints committed before the damage, or in spite of it.
    pub committed: u64,
}

/// Runs damaged streams through the decoder for so long: see [`run`].
#[must_use]
pub fn decoder(seed: u64, duration: Duration) -> FuzzReport {
    run("stream", one, seed, duration)
}

/// A target: what becomes of the case with this seed, which is whether it was refused, and how much
/// of it was believed.
pub type Target = fn(u64) -> (bool, u64);

/// Tries cases for so long, starting with `seed`, which grows by one per case and is the argument
/// that repeats a case.
///
/// # Panics
/// If a case does (what was never said is believed, a decoder panics); the message names the seed.
#[must_use]
pub fn run(name: &str, target: Target, seed: u64, duration: Duration) -> FuzzReport {
    let end = Instant::now() + duration;
    let mut report = FuzzReport::default();
    let mut case = seed;
    while Instant::now() < end {
        let outcome = std::panic::catch_unwind(|| target(case));
        let Ok((refused, committed)) = outcome else {
            panic!("the target {name} failed; repeat it with seed {case}");
        };
        report.cases += 1;
        report.refused += u64::from(refused);
        report.committed += committed;
        case = case.wrapping_add(1);
    }
    report
}

/// One case: whether it was refused, and how much was committed.
///
/// # Panics
/// If a checkpoint is committed that was never sent.
#[must_use]
pub fn one(seed: u64) -> (bool, u64) {
    let mut dice = Dice(seed ^ 0x5bd1_e995);
    let valid = stream(seed % 64);
    let honest = dice.below(3) == 0;
    let bytes = if honest {
        let mut bytes = valid.clone();
        damage(&mut bytes, &mut dice);
        bytes
    } else {
        resealed_damage(&valid, &mut dice)
    };
    let (committed, error) = receive(&bytes);
    if honest {
        let sent: HashSet<u64> = receive(&valid).0.into_iter().collect();
        assert!(committed.iter().all(|digest| sent.contains(digest)), "committed what never was");
    }
    small_messages(&bytes);
    (error.is_some(), committed.len() as u64)
}

fn resealed_damage(valid: &[u8], dice: &mut Dice) -> Vec<u8> {
    let mut frames = split(valid);
    for _ in 0..1 + dice.below(3) {
        let at = dice.below(frames.len());
        match dice.below(5) {
            0 => drop(frames.remove(at)),
            1 => frames.insert(at, frames[dice.below(frames.len())].clone()),
            2 => {
                let to = dice.below(frames.len());
                frames.swap(at, to);
            }
            3 => frames[at][4] = Kind::ALL[dice.below(Kind::ALL.len())].number() as u8,
            _ => {
                let mut payload = frames[at].split_off(HEADER_BYTES);
                damage(&mut payload, dice);
                frames[at].extend_from_slice(&payload);
            }
        }
        if frames.is_empty() {
            break;
        }
    }
    frames.iter_mut().for_each(reseal);
    frames.concat()
}

/// Every payload is tried as every small message, too.
fn small_messages(bytes: &[u8]) {
    let mut reader = FrameReader::default();
    let mut rest = bytes;
    while let Ok(frame) = reader.read(&mut rest) {
        let _ = open::<Hello>(&frame);
        let _ = open::<Welcome>(&frame);
        let _ = open::<Refuse>(&frame);
        let _ = open::<HostFacts>(&frame);
        let _ = open::<Vec<MemberEntry>>(&frame);
        let _ = open::<Vec<FileIdentity>>(&frame);
        let _ = open::<SwitchoverOffer>(&frame);
        let _ = open::<Position>(&frame);
        let _ = open::<Goodbye>(&frame);
        let _ = open::<CheckpointBegin>(&frame);
        let _ = open::<CheckpointEnd>(&frame);
        let _ = open::<String>(&frame);
        let _ = open_packet(&frame);
    }
}
