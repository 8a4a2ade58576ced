//! The first frames: who is there, which version, welcome or not.
//!
//! ```text
//!   dialler                     listener
//!   Hello  ───────────────────▶
//!          ◀───────────────────  Hello
//!   Welcome or Refuse ────────▶            (the spare's comes first,
//!          ◀──────── Welcome or Refuse      the primary decides last)
//! ```

use std::io::{Read, Write};

use hotspare_image::Term;

use crate::frame::{Frame, FrameBuffer, FrameError, FrameReader, Kind};
use crate::message::{
    Hello, HostRole, Refuse, RefuseCode, VERSION_MAX, VERSION_MIN, Welcome, open, seal,
};

/// Why two hosts do not come together.
#[derive(Debug, thiserror::Error)]
pub enum GreetingError {
    /// The peer says no; the text is its own.
    #[error("the {role} refused: {text}")]
    Refused {
        /// Its part, or the opposite of ours if it did not say.
        role: HostRole,
        /// For programs.
        code: RefuseCode,
        /// For people.
        text: String,
    },
    /// We say no.
    #[error("refused the {role}: {text}")]
    Refusing {
        /// Its part.
        role: HostRole,
        /// For programs.
        code: RefuseCode,
        /// For people.
        text: String,
    },
    /// The connection failed or the peer speaks something else.
    #[error("greet the {role}: {error}")]
    Frame {
        /// The part it should play.
        role: HostRole,
        /// What happened.
        error: FrameError,
    },
}

/// The versions this program speaks, for [`Hello`].
#[must_use]
pub fn versions() -> (u32, u32) {
    (VERSION_MIN, VERSION_MAX)
}

/// A greeting under way: the hellos are exchanged and fit.
pub struct Greeting<S> {
    stream: S,
    buffer: FrameBuffer,
    frames: FrameReader,
    role: HostRole,
    /// The version that both speak.
    pub version: u32,
    /// What the peer said of itself.
    pub peer: Hello,
}

impl<S: Read + Write> Greeting<S> {
    /// Exchanges hellos. `judge` looks at the peer's (its guest, its host) and may refuse it; role
    /// and version are judged here.
    pub fn exchange(
        stream: S,
        own: &Hello,
        judge: impl FnOnce(&Hello) -> Result<(), Refuse>,
    ) -> Result<Greeting<S>, GreetingError> {
        let other = opposite(own.role);
        let failed = |error: FrameError| GreetingError::Frame { role: other, error };
        let (mut stream, mut buffer) = (stream, FrameBuffer::default());
        let mut frames = FrameReader::default();
        let hello = seal(&mut buffer, Kind::Hello, own);
        stream.write_all(hello).and_then(|()| stream.flush()).map_err(|e| failed(e.into()))?;
        let frame = frames.read(&mut stream).map_err(failed)?;
        let peer: Hello = match frame.kind {
            Kind::Hello => open(&frame).map_err(failed)?,
            Kind::Refuse => return Err(refused(other, &frame)),
            kind => return Err(failed(FrameError::OutOfPlace { kind, why: "before hello" })),
        };
        let verdict = fit(own, &peer).and_then(|version| judge(&peer).map(|()| version));
        match verdict {
            Ok(version) => Ok(Greeting { stream, buffer, frames, role: own.role, version, peer }),
            Err(refuse) => Err(say_no(&mut stream, &mut buffer, other, refuse)),
        }
    }

    /// As a spare: says that we want to join (and the newest term we know), and waits for the
    /// primary's decision.
    pub fn join(mut self, term: Term) -> Result<(S, Welcome, Hello), GreetingError> {
        let own = Welcome {
            version: self.version,
            term,
            rank: 0,
            heart_key: Vec::new(),
            settings: Vec::new(),
        };
        self.send(&own)?;
        let welcome = self.receive()?;
        Ok((self.stream, welcome, self.peer))
    }

    /// As a primary: waits until the spare agrees. Then comes [`Greeting::welcome`] or
    /// [`Greeting::refuse`].
    pub fn await_spare(&mut self) -> Result<Term, GreetingError> {
        self.receive().map(|welcome| welcome.term)
    }

    /// As a primary: the spare is in. The version in `welcome` is filled in.
    pub fn welcome(mut self, welcome: &Welcome) -> Result<(S, Hello), GreetingError> {
        let welcome = Welcome { version: self.version, ..welcome.clone() };
        self.send(&welcome)?;
        Ok((self.stream, self.peer))
    }

    /// Says no, with the reason, and gives the error to log.
    pub fn refuse(mut self, code: RefuseCode, text: String) -> GreetingError {
        let refuse = Refuse { code, text };
        say_no(&mut self.stream, &mut self.buffer, self.peer.role, refuse)
    }

    fn send(&mut self, welcome: &Welcome) -> Result<(), GreetingError> {
        let bytes = seal(&mut self.buffer, Kind::Welcome, welcome);
        let sent = self.stream.write_all(bytes).and_then(|()| self.stream.flush());
        sent.map_err(|error| GreetingError::Frame { role: self.peer.role, error: error.into() })
    }

    fn receive(&mut self) -> Result<Welcome, GreetingError> {
        let role = opposite(self.role);
        let failed = |error| GreetingError::Frame { role, error };
        let frame = self.frames.read(&mut self.stream).map_err(failed)?;
        match frame.kind {
            Kind::Welcome => open(&frame).map_err(failed),
            Kind::Refuse => Err(refused(role, &frame)),
            kind => Err(failed(FrameError::OutOfPlace { kind, why: "before welcome" })),
        }
    }
}

fn opposite(role: HostRole) -> HostRole {
    match role {
        HostRole::Primary => HostRole::Spare,
        HostRole::Spare => HostRole::Primary,
    }
}

fn refused(role: HostRole, frame: &Frame<'_>) -> GreetingError {
    match open::<Refuse>(frame) {
        Ok(Refuse { code, text }) => GreetingError::Refused { role, code, text },
        Err(error) => GreetingError::Frame { role, error },
    }
}

fn say_no<S: Read + Write>(
    stream: &mut S,
    buffer: &mut FrameBuffer,
    role: HostRole,
    refuse: Refuse,
) -> GreetingError {
    // The peer may be gone already; the refusal stands either way.
    let _ = stream.write_all(seal(buffer, Kind::Refuse, &refuse));
    let _ = stream.flush();
    // Closing with bytes unread would reset the connection and might take the refusal with it, so
    // wait until the peer closes or refuses as well. One that sends on and on is left.
    let mut frames = FrameReader::default();
    for _ in 0..4 {
        match frames.read(stream) {
            Ok(frame) if frame.kind != Kind::Refuse => {}
            Ok(_) | Err(_) => break,
        }
    }
    GreetingError::Refusing { role, code: refuse.code, text: refuse.text }
}

/// The version both speak, or why there is none.
fn fit(own: &Hello, peer: &Hello) -> Result<u32, Refuse> {
    if own.role == peer.role {
        let text = match own.role {
            HostRole::Primary => "both hosts run a guest: start one with `hotspare spare`",
            HostRole::Spare => "both hosts are spares: start one with `hotspare run`",
        };
        return Err(Refuse { code: RefuseCode::Role, text: text.into() });
    }
    let version = own.version_max.min(peer.version_max);
    if version >= own.version_min.max(peer.version_min) {
        return Ok(version);
    }
    let older = if own.version_max < peer.version_max { own.role } else { peer.role };
    let text = format!(
        "the {} speaks protocol {}, the {} {}: upgrade hotspare on the {older}",
        own.role,
        range(own),
        peer.role,
        range(peer),
    );
    Err(Refuse { code: RefuseCode::Version, text })
}

fn range(hello: &Hello) -> String {
    match (hello.version_min, hello.version_max) {
        (min, max) if min == max => max.to_string(),
        (min, max) => format!("{min}–{max}"),
    }
}
