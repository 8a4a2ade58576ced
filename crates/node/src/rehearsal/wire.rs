//! What the agent tells the program on the stage, and what that says.
//!
//! Both are this program and of this host, joined by a pair of sockets. To the stage go frames: a
//! letter, the length of what follows (u32, little endian), and that. Back come lines of JSON.

use std::io::{self, Read, Write};
use std::time::Duration;

use hotspare_image::memory::{MmId, PageOwner, SharedId};
use hotspare_process::pages::{Content, PageRun};
use serde::{Deserialize, Serialize};

use super::Plan;
use super::report::Report;

/// Longest frame, bytes: a checkpoint's state.
const FRAME_BYTES_MAX: usize = hotspare_replica::staging::STATE_BYTES_MAX;

/// First words to the stage.
#[derive(Debug, Serialize, Deserialize)]
pub struct Orders {
    /// What is to be tried.
    pub plan: Plan,
    /// The guest's settings, as in the greeting.
    pub settings: Vec<(String, String)>,
    /// Its clocks, ns ahead of the host's: monotonic, since boot.
    pub clocks: (i64, i64),
    /// Its host name.
    pub host_name: String,
}

/// Where the memory is that is to be copied.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Sources {
    /// A process that has the address space, by its number on this host.
    pub holders: Vec<(u32, i32)>,
    /// A descriptor of the agent for each shared memory object.
    pub shared: Vec<(u64, i32)>,
}

/// A frame to the stage.
#[derive(Debug)]
pub enum Frame {
    /// The first.
    Orders(Orders),
    /// A piece of the copy of a directory.
    Copy(u8, Vec<u8>),
    /// A piece of changes of a directory.
    Changes(u8, Vec<u8>),
    /// The state of a checkpoint: from now on the ghost can be built and its memory copied.
    Build(Vec<u8>),
    /// Where that is.
    Sources(Sources),
    /// Pages of a checkpoint that has come since.
    Run(PageRun),
    /// That checkpoint is whole; its state, unless the ghost is not to be built yet.
    End(Vec<u8>),
    /// No more come.
    Last,
}

/// What the stage says.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Said {
    /// Memory is copied; the checkpoints that came meanwhile are wanted, and no more.
    Copied,
    /// How it went.
    Report(Box<Report>),
}

fn invalid(what: impl std::fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_string())
}

fn json(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).unwrap_or_default()
}

impl Frame {
    /// Writes it.
    pub fn write(&self, to: &mut impl Write) -> io::Result<()> {
        match self {
            Frame::Orders(orders) => put(to, b'o', &[], &json(orders)),
            Frame::Copy(directory, chunk) => put(to, b'c', &[*directory], chunk),
            Frame::Changes(directory, chunk) => put(to, b'f', &[*directory], chunk),
            Frame::Build(state) => put(to, b'b', &[], state),
            Frame::Sources(sources) => put(to, b's', &[], &json(sources)),
            Frame::Run(run) => put_run(to, run),
            Frame::End(state) => put(to, b'e', &[], state),
            Frame::Last => put(to, b'l', &[], &[]),
        }
    }

    /// Reads the next; an error where there is none.
    pub fn read(from: &mut impl Read) -> io::Result<Frame> {
        let mut head = [0u8; 5];
        from.read_exact(&mut head)?;
        let length = u32::from_le_bytes([head[1], head[2], head[3], head[4]]) as usize;
        if length > FRAME_BYTES_MAX {
            return Err(invalid("a frame is too long"));
        }
        let mut body = vec![0u8; length];
        from.read_exact(&mut body)?;
        let directory = body.first().copied();
        let chunk = |body: &mut Vec<u8>| match directory {
            Some(directory) => Ok((directory, body.split_off(1))),
            None => Err(invalid("a chunk of no directory")),
        };
        Ok(match head[0] {
            b'o' => Frame::Orders(serde_json::from_slice(&body)?),
            b'c' => chunk(&mut body).map(|(directory, chunk)| Frame::Copy(directory, chunk))?,
            b'f' => chunk(&mut body).map(|(directory, chunk)| Frame::Changes(directory, chunk))?,
            b'b' => Frame::Build(body),
            b's' => Frame::Sources(serde_json::from_slice(&body)?),
            b'r' => Frame::Run(run_of(body)?),
            b'e' => Frame::End(body),
            b'l' => Frame::Last,
            other => return Err(invalid(format!("a frame of kind {other}"))),
        })
    }

    /// Bytes that it keeps in memory while it waits.
    pub fn weight(&self) -> u64 {
        let content = match self {
            Frame::Copy(_, bytes)
            | Frame::Changes(_, bytes)
            | Frame::Build(bytes)
            | Frame::End(bytes) => bytes.len(),
            Frame::Run(PageRun { content: Content::Bytes(bytes), .. }) => bytes.len(),
            Frame::Run(_) | Frame::Orders(_) | Frame::Sources(_) | Frame::Last => 0,
        };
        content as u64 + 64
    }
}

fn put(to: &mut impl Write, kind: u8, head: &[u8], body: &[u8]) -> io::Result<()> {
    let length = u32::try_from(head.len() + body.len()).map_err(invalid)?;
    to.write_all(&[kind])?;
    to.write_all(&length.to_le_bytes())?;
    to.write_all(head)?;
    to.write_all(body)
}

const RUN_HEAD: usize = 18;

/// Owner's kind and number, address, what follows; then bytes, or how many pages.
fn put_run(to: &mut impl Write, run: &PageRun) -> io::Result<()> {
    let (kind, number) = match run.owner {
        PageOwner::Mm(id) => (0, u64::from(id.0)),
        PageOwner::Shared(id) => (1, id.0),
    };
    let mut head = Vec::with_capacity(RUN_HEAD);
    head.push(kind);
    head.extend(number.to_le_bytes());
    head.extend(run.start.to_le_bytes());
    match &run.content {
        Content::Bytes(bytes) => {
            head.push(0);
            put(to, b'r', &head, bytes)
        }
        Content::Zero(pages) => {
            head.push(1);
            put(to, b'r', &head, &pages.to_le_bytes())
        }
        Content::Discard(pages) => {
            head.push(2);
            put(to, b'r', &head, &pages.to_le_bytes())
        }
    }
}

fn run_of(mut body: Vec<u8>) -> io::Result<PageRun> {
    if body.len() < RUN_HEAD {
        return Err(invalid("a run without its head"));
    }
    let content = body.split_off(RUN_HEAD);
    let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|index| body[at + index]));
    let pages = || content.as_slice().try_into().map(u64::from_le_bytes).map_err(invalid);
    let owner = match body[0] {
        0 => PageOwner::Mm(MmId(u32::try_from(word(1)).map_err(invalid)?)),
        1 => PageOwner::Shared(SharedId(word(1))),
        _ => return Err(invalid("pages of nobody")),
    };
    let content = match body[17] {
        1 => Content::Zero(pages()?),
        2 => Content::Discard(pages()?),
        0 => Content::Bytes(content.into()),
        _ => return Err(invalid("pages of no kind")),
    };
    Ok(PageRun { owner, start: word(9), content })
}

/// For serde: times in milliseconds.
pub mod milliseconds {
    use super::Duration;
    use serde::{Deserialize, Deserializer, Serializer};

    /// As a number.
    pub fn serialize<S: Serializer>(time: &Duration, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u64(time.as_millis() as u64)
    }

    /// From one.
    pub fn deserialize<'a, D: Deserializer<'a>>(from: D) -> Result<Duration, D::Error> {
        u64::deserialize(from).map(Duration::from_millis)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_as_they_went() {
        let bytes = Content::Bytes(vec![7; 5000].into());
        let runs = [
            PageRun { owner: PageOwner::Mm(MmId(3)), start: 0x7000, content: bytes },
            PageRun { owner: PageOwner::Shared(SharedId(9)), start: 0, content: Content::Zero(4) },
            PageRun { owner: PageOwner::Mm(MmId(1)), start: 1, content: Content::Discard(5) },
        ];
        let mut pipe = Vec::new();
        for run in &runs {
            Frame::Run(run.clone()).write(&mut pipe).unwrap();
        }
        Frame::Changes(2, vec![1, 2, 3]).write(&mut pipe).unwrap();
        Frame::Last.write(&mut pipe).unwrap();
        let mut from = &pipe[..];
        for run in &runs {
            assert!(matches!(Frame::read(&mut from), Ok(Frame::Run(read)) if read == *run));
        }
        let changes = Frame::read(&mut from);
        assert!(matches!(changes, Ok(Frame::Changes(2, chunk)) if chunk == [1, 2, 3]));
        assert!(matches!(Frame::read(&mut from), Ok(Frame::Last)));
        assert!(Frame::read(&mut from).is_err());
    }

    #[test]
    fn what_is_no_frame_is_refused() {
        for wrong in [&b"x\0\0\0\0"[..], b"r\x02\0\0\0ab", b"c\0\0\0\0", b"e\xff\xff\xff\xff"] {
            let mut from = wrong;
            assert!(Frame::read(&mut from).is_err(), "{wrong:?}");
        }
    }
}
