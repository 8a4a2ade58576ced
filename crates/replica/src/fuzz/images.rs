//! Damaged images: what a checkpoint says of processes, and changes of files. The honest ones are
//! of a guest that was recorded.

use std::io::Read;
use std::sync::OnceLock;

use hotspare_image::Checkpoint;
use hotspare_image::files::{decode_changes, encode_changes};

use super::{Dice, damage};
use crate::frame::{FrameReader, HEADER_BYTES, Kind};
use crate::receiver::{Incoming, Receiver};
use crate::staging::StagingLimits;

const RECORDED: &[u8] = include_bytes!("../../tests/recorded/v4-primary.bin");
/// Head of a piece of file changes: directory, kind, length.
const PIECE_HEAD: usize = 8;

/// States, and pieces of file changes.
type Honest = (Vec<Vec<u8>>, Vec<Vec<u8>>);

/// What the recording has, or as much as can be read of it.
fn honest() -> &'static Honest {
    static HONEST: OnceLock<Honest> = OnceLock::new();
    HONEST.get_or_init(|| {
        let mut rest = RECORDED;
        // The greeting comes first.
        while let Ok(frame) = FrameReader::default().read(&mut { rest })
            && matches!(frame.kind, Kind::Hello | Kind::Welcome)
        {
            rest = &rest[HEADER_BYTES + frame.payload.len()..];
        }
        let mut receiver = Receiver::new(rest, StagingLimits::default());
        let (mut states, mut pieces) = (Vec::new(), Vec::new());
        while let Ok(incoming) = receiver.next() {
            let Incoming::Checkpoint(mut staged) = incoming else { continue };
            states.push(staged.state().to_vec());
            let mut files = Vec::new();
            let _ = staged.files().read_to_end(&mut files);
            let mut at = 0;
            while let Some(head) = files.get(at..at + PIECE_HEAD) {
                let length = u32::from_le_bytes([head[4], head[5], head[6], head[7]]) as usize;
                let end = (at + PIECE_HEAD + length).min(files.len());
                pieces.push(files[at + PIECE_HEAD..end].to_vec());
                at = end;
            }
        }
        (states, pieces)
    })
}

/// A damaged image; whether it was refused.
///
/// # Panics
/// If what is read of it cannot be written and read again.
#[must_use]
pub fn images(seed: u64) -> (bool, u64) {
    let mut dice = Dice(seed ^ 0x94d0_49bb);
    let (states, pieces) = honest();
    assert!(!states.is_empty() && !pieces.is_empty(), "the recording cannot be read");
    let is_state = dice.below(2) == 0;
    let from = if is_state { states } else { pieces };
    let mut bytes = from[dice.below(from.len())].clone();
    for _ in 0..1 + dice.below(3) {
        damage(&mut bytes, &mut dice);
    }
    let is_read = if is_state {
        let read = Checkpoint::from_bytes(&bytes);
        if let Ok(read) = &read {
            let again = Checkpoint::from_bytes(&read.to_bytes());
            assert!(again.is_ok_and(|again| again == *read), "an image changes when it is written");
        }
        read.is_ok()
    } else {
        let read = decode_changes(&bytes);
        if let Ok(read) = &read {
            let again = decode_changes(&encode_changes(read));
            assert!(again.is_ok_and(|again| again == *read), "changes change when written");
        }
        read.is_ok()
    };
    (!is_read, u64::from(is_read))
}
