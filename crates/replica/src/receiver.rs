//! The spare's end of the stream: frames in, checkpoints out, acknowledgements back.

use std::io::{self, Read, Write};

use hotspare_cluster::Closed;
use hotspare_image::files::FileIdentity;
use hotspare_image::{Epoch, Position};

use crate::frame::{Frame, FrameBuffer, FrameError, FrameReader, Kind};
use crate::kept::{Digest, DigestKey, Keeper};
use crate::message::{
    CheckpointBegin, Goodbye, MemberEntry, SwitchoverOffer, open, open_packet, seal, seal_packet,
};
use crate::pages::PageDecoder;
use crate::staging::{StagedCheckpoint, Staging, StagingLimits};

/// What the primary has sent.
#[derive(Debug)]
pub enum Incoming {
    /// A complete, checked checkpoint: acknowledge it, then apply it.
    Checkpoint(Box<StagedCheckpoint>),
    /// The checkpoint under way is void.
    Aborted(Position),
    /// Files that must be alike here, or no checkpoint after this may be acknowledged.
    Files(Vec<FileIdentity>),
    /// A record of the event log.
    Event(Vec<u8>),
    /// A packet.
    Packet(Vec<u8>),
    /// A packet that leaves here once this checkpoint is whole.
    Output(Epoch, Vec<u8>),
    /// The guest's packets are to pass through here.
    OpenPath,
    /// All spares.
    Members(Vec<MemberEntry>),
    /// The primary offers its term.
    SwitchoverOffer(SwitchoverOffer),
    /// The guest was killed.
    GuestDied,
    /// The primary closes the stream on purpose.
    Goodbye(Goodbye),
}

/// Reads the primary's stream on a thread of its own.
///
/// Memory is bounded: one frame, 16 MiB of bases, and of the checkpoint under way its state, and
/// pages and file changes as [`StagingLimits`] says. While the caller is busy with what
/// [`Receiver::next`] gave it, TCP holds the primary back.
pub struct Receiver<R> {
    stream: R,
    frames: FrameReader,
    decoder: PageDecoder,
    limits: StagingLimits,
    staging: Option<Staging>,
    last: Position,
}

impl<R: Read> Receiver<R> {
    /// A receiver after the greeting.
    pub fn new(stream: R, limits: StagingLimits) -> Receiver<R> {
        Receiver {
            stream,
            frames: FrameReader::default(),
            decoder: PageDecoder::default(),
            limits,
            staging: None,
            last: Position::default(),
        }
    }

    /// Pages that this spare tells as kept are read from `keeper`.
    #[must_use]
    pub fn with_keeper(mut self, keeper: impl Keeper + 'static) -> Self {
        self.decoder.kept = Some(Box::new(keeper));
        self
    }

    /// Waits for the next whole thing. After an error the stream is of no more use: what it was
    /// in the middle of is dropped, see [`closed`] for what to make of it.
    #[expect(clippy::should_implement_trait, reason = "an error ends it, not None")]
    pub fn next(&mut self) -> Result<Incoming, FrameError> {
        loop {
            let frame = self.frames.read(&mut self.stream)?;
            if let Some(staging) = &mut self.staging
                && matches!(frame.kind, Kind::Pages | Kind::State | Kind::FileChanges)
            {
                staging.stage(&frame, &mut self.decoder)?;
                continue;
            }
            if frame.kind == Kind::CheckpointBegin {
                let begin = Self::begin(&frame, self.staging.is_some(), self.last)?;
                self.staging = Some(Staging::new(begin, frame.checksum, &self.limits));
                continue;
            }
            return Self::whole(&frame, &mut self.staging, &mut self.last);
        }
    }

    fn begin(
        frame: &Frame<'_>,
        staging: bool,
        last: Position,
    ) -> Result<CheckpointBegin, FrameError> {
        let begin: CheckpointBegin = open(frame)?;
        let out_of_place = |why| Err(FrameError::OutOfPlace { kind: frame.kind, why });
        if staging {
            return out_of_place("the checkpoint before has not ended");
        }
        if begin.position <= last {
            return out_of_place("it does not follow the checkpoint before");
        }
        Ok(begin)
    }

    fn whole(
        frame: &Frame<'_>,
        staging: &mut Option<Staging>,
        last: &mut Position,
    ) -> Result<Incoming, FrameError> {
        let out_of_place = |why| FrameError::OutOfPlace { kind: frame.kind, why };
        let outside = out_of_place("there is no checkpoint under way");
        Ok(match frame.kind {
            Kind::CheckpointEnd => {
                let checkpoint = staging.take().ok_or(outside)?.end(open(frame)?)?;
                *last = checkpoint.position();
                Incoming::Checkpoint(Box::new(checkpoint))
            }
            Kind::Abort => {
                let position: Position = open(frame)?;
                let under_way = staging.take().ok_or(outside)?;
                if under_way.position() != position {
                    return Err(out_of_place("another checkpoint is under way"));
                }
                Incoming::Aborted(position)
            }
            Kind::Event => Incoming::Event(frame.payload.to_vec()),
            Kind::Packet => Incoming::Packet(frame.payload.to_vec()),
            Kind::Output => {
                let (epoch, packet) = open_packet(frame)?;
                Incoming::Output(Epoch(epoch), packet.to_vec())
            }
            Kind::Path => Incoming::OpenPath,
            Kind::Files => Incoming::Files(open(frame)?),
            Kind::Members => Incoming::Members(open(frame)?),
            Kind::SwitchoverOffer => Incoming::SwitchoverOffer(open(frame)?),
            Kind::GuestDied => Incoming::GuestDied,
            Kind::Goodbye => Incoming::Goodbye(open(frame)?),
            Kind::Pages | Kind::State | Kind::FileChanges => return Err(outside),
            Kind::Hello
            | Kind::Welcome
            | Kind::Refuse
            | Kind::CheckpointBegin
            | Kind::Ack
            | Kind::Kept
            | Kind::Input
            | Kind::SwitchoverRefused => return Err(out_of_place("a primary does not send it")),
        })
    }
}

/// The spare's answers.
pub struct Replier<W> {
    stream: W,
    buffer: FrameBuffer,
    batch: Vec<u8>,
}

impl<W: Write> Replier<W> {
    /// A replier after the greeting.
    pub fn new(stream: W) -> Replier<W> {
        Replier { stream, buffer: FrameBuffer::default(), batch: Vec::new() }
    }

    /// Tells the primary that this checkpoint will not be lost. The first, full one is best
    /// acknowledged once the ghost stands, later ones before they are applied.
    pub fn acknowledge(&mut self, position: Position) -> io::Result<()> {
        self.send(Kind::Ack, &position)
    }

    /// Declines an offered switchover.
    pub fn refuse_switchover(&mut self, why: &str) -> io::Result<()> {
        self.send(Kind::SwitchoverRefused, &why)
    }

    /// Tells of more pages that are kept here, at most [`crate::kept::DIGESTS_MAX`]; of none: that
    /// is all.
    pub fn kept(&mut self, key: &DigestKey, digests: &[Digest]) -> io::Result<()> {
        self.buffer.clear();
        self.buffer.extend(key);
        self.buffer.extend(digests.as_flattened());
        self.stream.write_all(self.buffer.seal(Kind::Kept, 0))?;
        self.stream.flush()
    }

    /// Says that clients reach the guest through here from now on.
    pub fn path_open(&mut self) -> io::Result<()> {
        self.buffer.clear();
        self.stream.write_all(self.buffer.seal(Kind::Path, 0))?;
        self.stream.flush()
    }

    /// Passes on packets for the guest, each with its number, in one go.
    pub fn inputs<'a>(
        &mut self,
        packets: impl IntoIterator<Item = (u64, &'a [u8])>,
    ) -> io::Result<()> {
        self.batch.clear();
        for (number, packet) in packets {
            let frame = seal_packet(&mut self.buffer, Kind::Input, number, packet);
            self.batch.extend_from_slice(frame);
        }
        self.stream.write_all(&self.batch)?;
        self.stream.flush()
    }

    /// Says why the stream is about to be closed.
    pub fn goodbye(&mut self, goodbye: &Goodbye) -> io::Result<()> {
        self.send(Kind::Goodbye, goodbye)
    }

    fn send(&mut self, kind: Kind, message: &impl minicbor::Encode<()>) -> io::Result<()> {
        self.stream.write_all(seal(&mut self.buffer, kind, message))?;
        self.stream.flush()
    }
}

/// What the end of a stream says about the peer. A reset or an end comes from the peer's kernel:
/// its agent is dead, for an agent that lives says goodbye. A timeout says that nothing was heard
/// for long, and unreadable bytes make *us* give up.
#[must_use]
pub fn closed(error: &FrameError) -> Closed {
    use io::ErrorKind::{
        BrokenPipe, ConnectionAborted, ConnectionReset, HostUnreachable, NetworkUnreachable,
        TimedOut, UnexpectedEof,
    };
    match error {
        FrameError::Ended => Closed::ByPeer,
        FrameError::Io(error) => match error.kind() {
            BrokenPipe | ConnectionAborted | ConnectionReset | UnexpectedEof => Closed::ByPeer,
            TimedOut | HostUnreachable | NetworkUnreachable => Closed::Silent,
            _ => Closed::ByUs,
        },
        _ => Closed::ByUs,
    }
}
