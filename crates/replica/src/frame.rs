//! Frames: what every byte on the stream belongs to.
//!
//! A frame is a header of [`HEADER_BYTES`] and a payload of at most [`PAYLOAD_BYTES_MAX`]. Layout
//! and golden examples: `docs/formats/stream.md`.

use std::io::{self, Read};

use xxhash_rust::xxh3::{Xxh3, xxh3_64, xxh3_64_with_seed};

/// First bytes of every frame.
pub const MAGIC: [u8; 4] = *b"HSpr";
/// Length of a header.
pub const HEADER_BYTES: usize = 24;
/// Most payload bytes of one frame; longer things are sent as several frames.
pub const PAYLOAD_BYTES_MAX: usize = 1 << 20;

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $number:literal,)*) => {
        /// What a frame is.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Kind { $($(#[$doc])* $name,)* }

        impl Kind {
            /// All kinds, for tests and for the format's page.
            pub const ALL: &[Kind] = &[$(Kind::$name,)*];

            /// The number on the wire.
            #[must_use]
            pub const fn number(self) -> u16 {
                match self { $(Kind::$name => $number,)* }
            }

            /// The kind of this number, if there is one.
            #[must_use]
            pub const fn from_number(number: u16) -> Option<Kind> {
                match number { $($number => Some(Kind::$name),)* _ => None }
            }
        }
    };
}

kinds! {
    /// Who speaks, from both sides, first of all. Readable by every version.
    Hello = 1,
    /// The other side is welcome; from both sides.
    Welcome = 2,
    /// The other side is not welcome, and why. Readable by every version.
    Refuse = 3,
    /// A checkpoint starts; pages may follow while the guest still runs.
    CheckpointBegin = 16,
    /// Page contents.
    Pages = 17,
    /// A piece of the checkpoint's state.
    State = 18,
    /// A piece of the epoch's file changes.
    FileChanges = 19,
    /// The checkpoint is complete.
    CheckpointEnd = 20,
    /// The checkpoint is void; the next one says what this one would have.
    Abort = 21,
    /// Files that both hosts must have alike before a checkpoint that ends after it counts.
    Files = 22,
    /// The spare has everything up to a position.
    Ack = 32,
    /// A record of the event log (`replay`).
    Event = 33,
    /// A packet that leaves with the log (`output-commit`, `replay`).
    Packet = 34,
    /// A packet of the guest, which leaves through the spare once that has the checkpoint.
    Output = 35,
    /// A packet for the guest, which came to the spare.
    Input = 36,
    /// Pages that the spare has of the ghost it had before.
    Kept = 37,
    /// Who the spares are.
    Members = 48,
    /// The primary offers its term.
    SwitchoverOffer = 49,
    /// The spare declines.
    SwitchoverRefused = 50,
    /// The guest was killed; take over.
    GuestDied = 51,
    /// The sender closes the stream on purpose.
    Goodbye = 52,
    /// The primary asks the spare to stand between the guest and its clients; the spare does.
    Path = 53,
}

/// Why bytes are not a frame, or a frame is not a message.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// The peer closed the stream between two frames.
    #[error("the stream ended")]
    Ended,
    /// Reading failed, or the stream ended within a frame.
    #[error("read from the stream: {0}")]
    Io(#[from] io::Error),
    /// The checkpoint under way cannot be kept here.
    #[error("keep the checkpoint under way in its temporary file: {0}; is the disk full?")]
    Staging(io::Error),
    /// A page that was told as kept is not there.
    #[error("read a page of the ghost before: {0}")]
    Kept(io::Error),
    /// The stream is not ours, or lost its step.
    #[error("the peer does not speak Hotspare's protocol (frame starts with {0:02x?})")]
    Magic([u8; 4]),
    /// A kind this version does not know.
    #[error("frame of unknown kind {0}")]
    UnknownKind(u16),
    /// A reserved field is not zero.
    #[error("frame with unknown flags {0:#x}")]
    UnknownFlags(u32),
    /// A length beyond the limit; nothing was allocated for it.
    #[error("frame of {0} bytes is longer than {PAYLOAD_BYTES_MAX}")]
    TooLong(u32),
    /// The bytes changed on their way.
    #[error("checksum of a {kind:?} frame is {found:#018x}, expected {expected:#018x}")]
    Checksum {
        /// Of which frame.
        kind: Kind,
        /// In the header.
        expected: u64,
        /// Of the bytes that arrived.
        found: u64,
    },
    /// The payload does not follow its format.
    #[error("malformed {kind:?} frame: {why}")]
    Malformed {
        /// Of which frame.
        kind: Kind,
        /// In which way.
        why: String,
    },
    /// A frame that has no place here.
    #[error("{kind:?} frame out of place: {why}")]
    OutOfPlace {
        /// Of which frame.
        kind: Kind,
        /// In which way.
        why: &'static str,
    },
}

/// Bit of the header's flags in a Pages frame: the receiver keeps these pages as bases for XOR.
pub const FLAG_REMEMBER: u16 = 1;

/// A frame under construction: one buffer, header first, so that it leaves in one write.
#[derive(Debug)]
pub struct FrameBuffer {
    bytes: Vec<u8>,
}

impl Default for FrameBuffer {
    fn default() -> Self {
        FrameBuffer { bytes: vec![0; HEADER_BYTES] }
    }
}

impl FrameBuffer {
    /// Forgets the last frame and keeps the memory.
    pub fn clear(&mut self) {
        self.bytes.truncate(HEADER_BYTES);
    }

    /// The payload so far; append to it.
    pub fn payload(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }

    /// Appends to the payload.
    pub fn extend(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Writes the header and gives the whole frame.
    ///
    /// # Panics
    /// If the payload is longer than [`PAYLOAD_BYTES_MAX`]: the caller splits.
    pub fn seal(&mut self, kind: Kind, flags: u16) -> &[u8] {
        let length = self.bytes.len() - HEADER_BYTES;
        assert!(length <= PAYLOAD_BYTES_MAX, "a frame of {length} bytes");
        let (head, payload) = self.bytes.split_at_mut(HEADER_BYTES);
        put_header(head, kind, flags, length);
        let checksum = checksum(&head[..16], payload);
        head[16..24].copy_from_slice(&checksum.to_le_bytes());
        &self.bytes
    }

    /// The same for a payload that goes on in `tail`, which is to be sent behind it: large contents
    /// need not be copied into the buffer. Gives the checksum.
    ///
    /// # Panics
    /// If the payload is longer than [`PAYLOAD_BYTES_MAX`].
    pub fn seal_with(&mut self, kind: Kind, flags: u16, tail: &[&[u8]]) -> u64 {
        let behind: usize = tail.iter().map(|piece| piece.len()).sum();
        let length = self.bytes.len() - HEADER_BYTES + behind;
        assert!(length <= PAYLOAD_BYTES_MAX, "a frame of {length} bytes");
        let (head, payload) = self.bytes.split_at_mut(HEADER_BYTES);
        put_header(head, kind, flags, length);
        let mut hash = Xxh3::with_seed(xxh3_64(&head[..16]));
        hash.update(payload);
        tail.iter().for_each(|piece| hash.update(piece));
        let checksum = hash.digest();
        head[16..24].copy_from_slice(&checksum.to_le_bytes());
        checksum
    }

    /// The frame [`FrameBuffer::seal`] made last.
    #[must_use]
    pub fn sealed(&self) -> &[u8] {
        &self.bytes
    }
}

/// All of a header but its checksum.
fn put_header(head: &mut [u8], kind: Kind, flags: u16, length: usize) {
    head[0..4].copy_from_slice(&MAGIC);
    head[4..6].copy_from_slice(&kind.number().to_le_bytes());
    head[6..8].copy_from_slice(&flags.to_le_bytes());
    head[8..12].copy_from_slice(&(length as u32).to_le_bytes());
    head[12..16].fill(0);
}

/// XXH3-64 of the payload, seeded with XXH3-64 of the header's first 16 bytes.
fn checksum(head: &[u8], payload: &[u8]) -> u64 {
    xxh3_64_with_seed(payload, xxh3_64(head))
}

/// One frame as it arrived, its checksum verified.
#[derive(Clone, Copy, Debug)]
pub struct Frame<'a> {
    /// What it is.
    pub kind: Kind,
    /// Kind-specific bits.
    pub flags: u16,
    /// The checksum, which stands for the whole frame.
    pub checksum: u64,
    /// Its bytes.
    pub payload: &'a [u8],
}

/// Reads frames into one buffer that never grows beyond the largest frame.
#[derive(Debug, Default)]
pub struct FrameReader {
    payload: Vec<u8>,
}

impl FrameReader {
    /// The next frame. Blocks; allocates at most [`PAYLOAD_BYTES_MAX`].
    pub fn read<'a>(&'a mut self, stream: &mut impl Read) -> Result<Frame<'a>, FrameError> {
        let mut head = [0; HEADER_BYTES];
        read_header(stream, &mut head)?;
        let field = |at: usize| [head[at], head[at + 1], head[at + 2], head[at + 3]];
        if field(0) != MAGIC {
            return Err(FrameError::Magic(field(0)));
        }
        let number = u16::from_le_bytes([head[4], head[5]]);
        let kind = Kind::from_number(number).ok_or(FrameError::UnknownKind(number))?;
        let flags = u16::from_le_bytes([head[6], head[7]]);
        let length = u32::from_le_bytes(field(8));
        let reserved = u32::from_le_bytes(field(12));
        let known = if kind == Kind::Pages { FLAG_REMEMBER } else { 0 };
        if flags & !known != 0 || reserved != 0 {
            return Err(FrameError::UnknownFlags(u32::from(flags) | reserved));
        }
        if length as usize > PAYLOAD_BYTES_MAX {
            return Err(FrameError::TooLong(length));
        }
        let expected = u64::from_le_bytes(head[16..24].try_into().unwrap_or_default());
        // The buffer keeps its length: zeroing it for every frame would cost more than the copy.
        if self.payload.len() < length as usize {
            self.payload.resize(length as usize, 0);
        }
        let payload = &mut self.payload[..length as usize];
        stream.read_exact(payload)?;
        let found = checksum(&head[..16], payload);
        if found != expected {
            return Err(FrameError::Checksum { kind, expected, found });
        }
        Ok(Frame { kind, flags, checksum: expected, payload })
    }
}

fn read_header(stream: &mut impl Read, head: &mut [u8; HEADER_BYTES]) -> Result<(), FrameError> {
    let mut filled = 0;
    while filled < HEADER_BYTES {
        match stream.read(&mut head[filled..]) {
            Ok(0) if filled == 0 => return Err(FrameError::Ended),
            Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: Kind, payload: &[u8]) -> Vec<u8> {
        let mut buffer = FrameBuffer::default();
        buffer.extend(payload);
        buffer.seal(kind, 0).to_vec()
    }

    #[test]
    fn a_frame_survives_the_wire() {
        let bytes = frame(Kind::State, b"the state");
        let mut reader = FrameReader::default();
        let read = reader.read(&mut bytes.as_slice()).unwrap();
        assert_eq!((read.kind, read.payload), (Kind::State, &b"the state"[..]));
    }

    #[test]
    fn a_frame_with_a_tail_is_the_frame_of_all_of_it() {
        let content: Vec<u8> = (0..9000u32).map(|at| (at * 7) as u8).collect();
        for (first, second) in [(0, 0), (10, 0), (10, 200), (300, 4396), (9000, 9000)] {
            let mut parted = FrameBuffer::default();
            parted.extend(&content[..first]);
            let tail = [&content[first..second.max(first)], &content[second.max(first)..]];
            let checksum = parted.seal_with(Kind::Pages, FLAG_REMEMBER, &tail);
            let bytes = [parted.sealed(), tail[0], tail[1]].concat();
            let mut whole = FrameBuffer::default();
            whole.extend(&content);
            assert!(bytes == whole.seal(Kind::Pages, FLAG_REMEMBER), "{first}, {second}");
            let mut reader = FrameReader::default();
            assert_eq!(reader.read(&mut bytes.as_slice()).unwrap().checksum, checksum);
        }
    }

    #[test]
    fn every_kind_has_a_number_of_its_own() {
        for kind in Kind::ALL {
            assert_eq!(Kind::from_number(kind.number()), Some(*kind));
        }
    }

    #[test]
    fn an_announced_length_beyond_the_limit_allocates_nothing() {
        let mut bytes = frame(Kind::State, b"");
        bytes[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
        let mut reader = FrameReader::default();
        let error = reader.read(&mut bytes.as_slice()).unwrap_err();
        assert!(matches!(error, FrameError::TooLong(_)), "{error}");
        assert_eq!(reader.payload.capacity(), 0);
    }

    #[test]
    fn an_end_between_frames_differs_from_one_within() {
        let bytes = frame(Kind::State, b"the state");
        let mut reader = FrameReader::default();
        assert!(matches!(reader.read(&mut &bytes[..0]), Err(FrameError::Ended)));
        for length in 1..bytes.len() {
            assert!(matches!(reader.read(&mut &bytes[..length]), Err(FrameError::Io(_))));
        }
    }
}
