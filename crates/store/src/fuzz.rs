//! Long runs of the manifest's decoder on damaged bytes, in stable Rust: `cargo xtask fuzz`.

use hotspare_image::memory::{MmId, PageOwner, SharedId};
use hotspare_image::{Epoch, Position, Term};

use crate::fold::{Layer, fold};
use crate::manifest::{About, BLOCK_PAGES, Block, Manifest, PageRun, envelope};
use crate::pages::Pages;
use crate::seal;

/// SplitMix64 (Steele, Lea, Flood 2014).
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.roll() % limit as u64) as usize
    }
}

const NAME: &str = "guest/checkpoints/x";

fn honest(dice: &mut Dice) -> Manifest {
    let blocks = 1 + dice.below(4);
    let block = |at: usize| Block {
        pack: 0,
        offset: at as u64 * 1000,
        stored: 1000,
        raw: BLOCK_PAGES as u32 * 4096,
        hash: [at as u8; seal::HASH_BYTES],
    };
    let run = |owner, first, pages, zero| PageRun { owner, first, pages, zero };
    Manifest {
        about: About {
            guest: "guest".into(),
            position: Position::checkpoint(Epoch(dice.roll() >> 40)),
            term: Term(1),
            time_ms: dice.roll() >> 20,
            settings: vec![("guest".into(), "guest".into())],
            ..About::default()
        },
        reign: 1 + (dice.roll() >> 50),
        base: None,
        packs: vec![blocks as u64 * 1000 + 500],
        state: vec![Block { offset: blocks as u64 * 1000, stored: 500, raw: 700, ..block(0) }],
        changes: Vec::new(),
        blocks: (0..blocks).map(block).collect(),
        owners: vec![PageOwner::Mm(MmId(1)), PageOwner::Shared(SharedId(9))],
        gone: Vec::new(),
        runs: vec![
            run(0, dice.roll() >> 30, BLOCK_PAGES * blocks as u64 - 1, false),
            run(1, 5, 70, true),
            run(1, 100, 1, false),
        ],
        attempt: 1,
    }
}

/// A damaged manifest; whether it was refused. Half of them have a digest that is right.
///
/// # Panics
/// If damage goes unnoticed, or what is believed does not hold together.
#[must_use]
pub fn manifests(seed: u64) -> (bool, u64) {
    let mut dice = Dice(seed);
    let manifest = honest(&mut dice);
    let raw = minicbor::to_vec(&manifest).expect("writes to memory");
    if dice.below(2) == 0 {
        let mut bytes = envelope(&raw, NAME, None).expect("seals");
        let at = dice.below(bytes.len());
        match dice.below(3) {
            0 => bytes.truncate(at),
            1 => bytes.insert(at, dice.roll() as u8),
            _ => bytes[at] ^= 1 << dice.below(8),
        }
        assert!(Manifest::open(&bytes, NAME, None).is_err(), "damage is noticed");
        return (true, 0);
    }
    let mut raw = raw;
    for _ in 0..1 + dice.below(4) {
        let at = dice.below(raw.len());
        match dice.below(4) {
            0 => raw.truncate(at.max(1)),
            1 => raw.insert(at, dice.roll() as u8),
            2 => drop(raw.remove(at)),
            _ => raw[at] = dice.roll() as u8,
        }
        if raw.is_empty() {
            return (true, 0);
        }
    }
    let bytes = envelope(&raw, NAME, None).expect("seals");
    let Ok(read) = Manifest::open(&bytes, NAME, None) else { return (true, 0) };
    let mut folded = Pages::default();
    folded.follow(&read.pages(0), |place| place);
    let there: u64 = read.blocks.iter().map(|block| u64::from(block.raw) / 4096).sum();
    assert!(folded.with_bytes() <= there, "no page is where there is none");
    // As a chain of two, merged and followed: whatever it lists, both come to the same.
    folded.follow(&read.pages(1), |place| place);
    let mut merged = fold(vec![Layer::of(&read, 0), Layer::of(&read, 1)]);
    for (owner, owned) in folded.0 {
        let same = merged.0.remove(&owner).unwrap_or_default();
        assert_eq!(same.pages, owned.pages, "merged as followed");
    }
    assert!(merged.0.is_empty(), "nobody has been made up");
    let again = read.seal(NAME, None).expect("seals");
    assert_eq!(Manifest::open(&again, NAME, None).expect("opens"), read);
    (false, 1)
}

#[cfg(test)]
mod tests {
    #[test]
    fn damaged_manifests_are_survived() {
        let believed: u64 = (0..4000).map(|seed| super::manifests(seed).1).sum();
        assert!(believed > 10, "some damage makes sense");
    }
}
