//! The small frames: CBOR arrays, to which later versions may append.

use std::net::SocketAddr;

use hotspare_image::{NodeId, Position, Term};
use minicbor::{Decode, Encode};

use crate::frame::{Frame, FrameBuffer, FrameError, Kind};

/// Oldest version of the protocol this program speaks.
pub const VERSION_MIN: u32 = 3;
/// Newest version of the protocol this program speaks.
pub const VERSION_MAX: u32 = 5;
/// From this version on packets can pass through the spare.
pub const VERSION_OF_PATH: u32 = 4;
/// From this version on a spare tells what it has kept.
pub const VERSION_OF_KEPT: u32 = 5;

/// A host's part at the moment of greeting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(index_only)]
pub enum HostRole {
    /// Runs the guest.
    #[n(0)]
    Primary,
    /// Wants to hold its ghost.
    #[n(1)]
    Spare,
}

impl std::fmt::Display for HostRole {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            HostRole::Primary => "primary",
            HostRole::Spare => "spare",
        })
    }
}

/// What must agree between two hosts before one can hold the other's ghost. Compared by the agent,
/// opaque to the stream.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(array)]
pub struct HostFacts {
    /// `uname -r` and `uname -v`.
    #[n(0)]
    pub kernel: String,
    /// CPU features that programs can see.
    #[n(1)]
    pub cpu_features: Vec<String>,
    /// Anything else as name and value (XSAVE size, page size, TCP settings …).
    #[n(2)]
    pub others: Vec<(String, String)>,
}

/// First frame of both sides.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(array)]
pub struct Hello {
    /// Oldest version it speaks.
    #[n(0)]
    pub version_min: u32,
    /// Newest version it speaks.
    #[n(1)]
    pub version_max: u32,
    /// Its part.
    #[n(2)]
    pub role: HostRole,
    /// Which node.
    #[n(3)]
    pub node: NodeId,
    /// Which guest it runs or holds; a fresh spare holds none.
    #[n(4)]
    pub guest: Option<String>,
    /// The newest term it knows.
    #[n(5)]
    pub term: Term,
    /// Its host.
    #[n(6)]
    pub facts: HostFacts,
    /// UDP port of its heartbeats.
    #[n(7)]
    pub heart_port: u16,
    /// TCP port it listens on for hosts that want to join.
    #[n(8)]
    pub listen_port: Option<u16>,
}

/// The other side is welcome.
#[derive(Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(array)]
pub struct Welcome {
    /// The version both speak from here on.
    #[n(0)]
    pub version: u32,
    /// Term of the primary (from a spare: the newest it knows).
    #[n(1)]
    pub term: Term,
    /// The spare's rank (from a spare: 0).
    #[n(2)]
    pub rank: u32,
    /// Key of the heartbeats of this guest's cluster (from a spare: empty).
    #[n(3)]
    #[cbor(with = "minicbor::bytes")]
    pub heart_key: Vec<u8>,
    /// The primary's settings that the spare must share, as name and value.
    #[n(4)]
    pub settings: Vec<(String, String)>,
}

impl std::fmt::Debug for Welcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The key stays out of logs.
        f.debug_struct("Welcome")
            .field("version", &self.version)
            .field("term", &self.term)
            .field("rank", &self.rank)
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}

/// Why the other side is not welcome, for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(index_only)]
pub enum RefuseCode {
    /// No version in common.
    #[n(0)]
    Version,
    /// Both are primaries, or both spares.
    #[n(1)]
    Role,
    /// It holds or runs another guest.
    #[n(2)]
    Guest,
    /// The hosts differ in something the ghost depends on.
    #[n(3)]
    Host,
    /// Not now: too many spares, a takeover or switchover in progress.
    #[n(4)]
    Busy,
    /// Files differ.
    #[n(5)]
    Files,
    /// Anything else; the text says what.
    #[n(6)]
    Other,
}

/// The other side is not welcome.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(array)]
pub struct Refuse {
    /// For programs.
    #[n(0)]
    pub code: RefuseCode,
    /// For people: what is wrong and what to do.
    #[n(1)]
    pub text: String,
}

/// A checkpoint starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(array)]
pub struct CheckpointBegin {
    /// What it will be.
    #[n(0)]
    pub position: Position,
    /// Reign of its primary.
    #[n(1)]
    pub term: Term,
    /// Holds everything, not only changes.
    #[n(2)]
    pub full: bool,
}

/// A checkpoint is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(array)]
pub struct CheckpointEnd {
    /// As announced by its begin.
    #[n(0)]
    pub position: Position,
    /// Frames between begin and end.
    #[n(1)]
    pub frames: u64,
    /// [`crate::staging::chain`] over the checksums of begin and these frames.
    #[n(2)]
    pub hash: u64,
    /// Of the packets that this spare has passed on: the last one that it covers.
    #[n(3)]
    pub inputs: Option<u64>,
}

/// A spare, as its primary lists it.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(array)]
pub struct MemberEntry {
    /// Which.
    #[n(0)]
    pub node: NodeId,
    /// Its place in the queue.
    #[n(1)]
    pub rank: u32,
    /// It has a complete ghost.
    #[n(2)]
    pub ready: bool,
    /// Where it hears heartbeats, as `ADDRESS:PORT`.
    #[n(3)]
    pub heart: String,
    /// Where it listens once it is primary, as `ADDRESS:PORT`.
    #[n(4)]
    pub listens: Option<String>,
    /// Clients may have seen what it does not know: it must not take over.
    #[n(5)]
    pub stands_by: Option<bool>,
}

impl MemberEntry {
    /// Where it hears heartbeats, if that is an address.
    #[must_use]
    pub fn heart_address(&self) -> Option<SocketAddr> {
        self.heart.parse().ok()
    }
}

/// The primary offers its term.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(array)]
pub struct SwitchoverOffer {
    /// The term to claim.
    #[n(0)]
    pub term: Term,
    /// The last checkpoint of the frozen guest.
    #[n(1)]
    pub position: Position,
}

/// Why a stream is closed on purpose, for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(index_only)]
pub enum GoodbyeCode {
    /// The guest ended by itself: nothing to protect any more.
    #[n(0)]
    GuestEnded,
    /// The sender is fenced or has stepped down.
    #[n(1)]
    SteppedDown,
    /// The spare is dropped: silent, too slow, or by the operator.
    #[n(2)]
    Dropped,
    /// The sender cannot go on; the text says why.
    #[n(3)]
    Failed,
    /// The operator ended it.
    #[n(4)]
    Stopped,
    /// Files that must be alike are not; the text names them.
    #[n(5)]
    Files,
}

/// The sender closes the stream on purpose.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(array)]
pub struct Goodbye {
    /// For programs.
    #[n(0)]
    pub code: GoodbyeCode,
    /// For people.
    #[n(1)]
    pub text: String,
}

/// Puts a small message into `buffer` as one frame.
///
/// # Panics
/// If it is longer than a frame; small messages are bounded by what fills them.
pub fn seal<'a>(buffer: &'a mut FrameBuffer, kind: Kind, message: &impl Encode<()>) -> &'a [u8] {
    buffer.clear();
    match minicbor::encode(message, buffer.payload()) {
        Ok(()) => buffer.seal(kind, 0),
        Err(never) => unreachable!("writing to memory cannot fail: {never}"),
    }
}

/// Reads a small message.
pub fn open<'b, T: Decode<'b, ()>>(frame: &Frame<'b>) -> Result<T, FrameError> {
    let mut decoder = minicbor::Decoder::new(frame.payload);
    let malformed = |why: String| FrameError::Malformed { kind: frame.kind, why };
    let message = decoder.decode().map_err(|error| malformed(error.to_string()))?;
    if decoder.position() != frame.payload.len() {
        return Err(malformed("bytes after its end".into()));
    }
    Ok(message)
}

/// Puts a packet with its number into `buffer` as one frame.
///
/// # Panics
/// If it is longer than a frame; a packet is not.
pub fn seal_packet<'a>(
    buffer: &'a mut FrameBuffer,
    kind: Kind,
    number: u64,
    packet: &[u8],
) -> &'a [u8] {
    buffer.clear();
    buffer.extend(&number.to_le_bytes());
    buffer.extend(packet);
    buffer.seal(kind, 0)
}

/// Reads a packet and its number.
pub fn open_packet<'b>(frame: &Frame<'b>) -> Result<(u64, &'b [u8]), FrameError> {
    let short = || FrameError::Malformed { kind: frame.kind, why: "it has no number".into() };
    let (number, packet) = frame.payload.split_first_chunk().ok_or_else(short)?;
    Ok((u64::from_le_bytes(*number), packet))
}
