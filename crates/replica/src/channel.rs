//! The connection below the frames: plain TCP, or TLS 1.3 with certificates on both sides.

use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream, ToSocketAddrs};
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hotspare_kernel::descriptor::{Soon, closed_early};
use hotspare_kernel::socket::set_option_i32;
use nix::sys::socket::{setsockopt, sockopt};
use rustls::pki_types::ServerName;
use rustls::{ClientConnection, Connection, ServerConnection};

use crate::keys::{Identity, NODE_NAME};

/// Patience with a peer that connects and then says nothing, or that cannot be reached.
pub const GREETING_PATIENCE: Duration = Duration::from_secs(10);
/// How long sent bytes may stay unacknowledged before the kernel gives the connection up: far
/// beyond any suspicion, so that it decides nothing, but a writer does not hang for ever.
const USER_TIMEOUT_MS: u32 = 10_000;
/// See [`Channel::keep_short`].
const UNSENT_BYTES: i32 = 256 << 10;
/// Plain text given to TLS at once: few lock cycles, yet acknowledgements never wait long.
const TLS_PIECE: usize = 128 << 10;

/// Who may be talked to.
#[derive(Clone, Debug)]
pub enum Security {
    /// Plain text. On an address other than loopback only if the operator says so.
    Plain {
        /// `--insecure` was given.
        insecure: bool,
    },
    /// Mutual TLS: both sides show a certificate of one CA.
    Tls(Arc<Identity>),
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// Plain text to a host beyond this one.
    #[error(
        "refusing to send the guest's memory to {0} in plain text: make certificates with \
         `hotspare keys`, or give --insecure on a network you trust"
    )]
    PlainText(SocketAddr),
    /// The name means nothing.
    #[error("{address} is not a HOST:PORT that can be looked up: {error}")]
    Address {
        /// What was given.
        address: String,
        /// What the resolver says.
        error: io::Error,
    },
    /// Nobody there.
    #[error("cannot connect to {address}: {error}; is `hotspare spare --listen` running there?")]
    Connect {
        /// Where.
        address: String,
        /// What the kernel says.
        error: io::Error,
    },
    /// The socket fails.
    #[error("set up the connection: {0}")]
    Socket(#[from] io::Error),
    /// The peer has no certificate of our CA, or does not speak TLS.
    #[error(
        "the TLS handshake with {peer} failed: {error}; both sides need certificates that the \
         same `hotspare keys` directory has issued"
    )]
    Handshake {
        /// With whom.
        peer: SocketAddr,
        /// What TLS says.
        error: io::Error,
    },
}

/// A connection, before it is split between a reading and a writing thread.
#[derive(Debug)]
pub struct Channel {
    /// For the reading thread.
    pub read: ReadHalf,
    /// For the writing thread.
    pub write: WriteHalf,
    peer: SocketAddr,
    socket: TcpStream,
}

impl Channel {
    /// Dials `address` (`HOST:PORT`), trying each of its addresses.
    pub fn connect(address: &str, security: &Security) -> Result<Channel, ChannelError> {
        let wrong = |error| ChannelError::Address { address: address.to_owned(), error };
        let mut last = io::Error::from(io::ErrorKind::NotFound);
        for candidate in address.to_socket_addrs().map_err(wrong)? {
            check_plain(candidate, security)?;
            match TcpStream::connect_timeout(&candidate, GREETING_PATIENCE) {
                Ok(stream) => return Channel::dialled(stream, security),
                Err(error) => last = error,
            }
        }
        Err(ChannelError::Connect { address: address.to_owned(), error: last })
    }

    /// The dialling side of a connected stream.
    pub fn dialled(stream: TcpStream, security: &Security) -> Result<Channel, ChannelError> {
        let stream = TcpStream::from(closed_early(stream.into(), Soon::Stream));
        match security {
            Security::Plain { .. } => Channel::plain(stream, security),
            Security::Tls(identity) => {
                let name = ServerName::try_from(NODE_NAME).map_err(io::Error::other)?;
                let connection = ClientConnection::new(identity.client.clone(), name);
                Channel::tls(stream, connection.map_err(io::Error::other)?.into())
            }
        }
    }

    /// The listening side of an accepted stream.
    pub fn accepted(stream: TcpStream, security: &Security) -> Result<Channel, ChannelError> {
        let stream = TcpStream::from(closed_early(stream.into(), Soon::Stream));
        match security {
            Security::Plain { .. } => Channel::plain(stream, security),
            Security::Tls(identity) => {
                let connection = ServerConnection::new(identity.server.clone());
                Channel::tls(stream, connection.map_err(io::Error::other)?.into())
            }
        }
    }

    fn plain(stream: TcpStream, security: &Security) -> Result<Channel, ChannelError> {
        let peer = set_up(&stream)?;
        check_plain(peer, security)?;
        Ok(Channel {
            read: ReadHalf::Plain(stream.try_clone()?),
            write: WriteHalf::Plain(stream.try_clone()?),
            peer,
            socket: stream,
        })
    }

    fn tls(stream: TcpStream, mut connection: Connection) -> Result<Channel, ChannelError> {
        let peer = set_up(&stream)?;
        connection.set_buffer_limit(Some(4 * TLS_PIECE));
        while connection.is_handshaking() {
            connection
                .complete_io(&mut &stream)
                .map_err(|error| ChannelError::Handshake { peer, error })?;
        }
        let session = Arc::new(Mutex::new(connection));
        let socket = stream.try_clone()?;
        let sealed = vec![0; TLS_PIECE].into_boxed_slice();
        let read =
            TlsReader { socket, session: session.clone(), sealed, unread: 0..0, ended: false };
        let write = TlsWriter { socket: stream.try_clone()?, session, sealed: Vec::new() };
        let (read, write) = (ReadHalf::Tls(Box::new(read)), WriteHalf::Tls(Box::new(write)));
        Ok(Channel { read, write, peer, socket: stream })
    }

    /// The other side.
    #[must_use]
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// Our side's address, as the peer sees it.
    pub fn local(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// Lets the kernel take little that it cannot send yet (`TCP_NOTSENT_LOWAT`, tcp(7)): what is
    /// urgent goes before the rest only as long as that waits here.
    pub fn keep_short(&self) -> Result<(), hotspare_kernel::KernelError> {
        const TCP_NOTSENT_LOWAT: i32 = 25;
        let (level, bytes) = (nix::libc::IPPROTO_TCP, UNSENT_BYTES);
        set_option_i32(self.socket.as_fd(), level, TCP_NOTSENT_LOWAT, bytes)
    }

    /// The greeting is over: from here on silence is judged by heartbeats, not by the socket.
    /// Gives the halves and a handle that ends both at any time.
    pub fn split(self) -> io::Result<(ReadHalf, WriteHalf, Hangup)> {
        self.socket.set_read_timeout(None)?;
        self.socket.set_write_timeout(None)?;
        Ok((self.read, self.write, Hangup(self.socket)))
    }
}

impl Read for Channel {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.read.read(into)
    }
}

impl Write for Channel {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write.write(bytes)
    }

    fn write_vectored(&mut self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        self.write.write_vectored(pieces)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.write.flush()
    }
}

/// Ends a connection from any thread; blocked reads and writes return.
#[derive(Debug)]
pub struct Hangup(TcpStream);

impl Hangup {
    /// Ends it. A second time does nothing.
    pub fn hang_up(&self) {
        // Fails only if the connection is gone already.
        let _ = self.0.shutdown(Shutdown::Both);
    }
}

fn check_plain(peer: SocketAddr, security: &Security) -> Result<(), ChannelError> {
    match security {
        Security::Plain { insecure: false } if !peer.ip().to_canonical().is_loopback() => {
            Err(ChannelError::PlainText(peer))
        }
        Security::Plain { .. } | Security::Tls(_) => Ok(()),
    }
}

/// Socket buffers are left to the kernel: setting them by hand ends their growth (tcp(7)).
fn set_up(stream: &TcpStream) -> io::Result<SocketAddr> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(GREETING_PATIENCE))?;
    stream.set_write_timeout(Some(GREETING_PATIENCE))?;
    setsockopt(stream, sockopt::KeepAlive, &true)?;
    setsockopt(stream, sockopt::TcpKeepIdle, &5)?;
    setsockopt(stream, sockopt::TcpKeepInterval, &2)?;
    setsockopt(stream, sockopt::TcpKeepCount, &3)?;
    setsockopt(stream, sockopt::TcpUserTimeout, &USER_TIMEOUT_MS)?;
    stream.peer_addr()
}

/// Reads from the peer.
#[derive(Debug)]
pub enum ReadHalf {
    /// Plain text.
    Plain(TcpStream),
    /// TLS.
    Tls(Box<TlsReader>),
}

/// Writes to the peer.
#[derive(Debug)]
pub enum WriteHalf {
    /// Plain text.
    Plain(TcpStream),
    /// TLS.
    Tls(Box<TlsWriter>),
}

impl Read for ReadHalf {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            ReadHalf::Plain(stream) => stream.read(into),
            ReadHalf::Tls(reader) => reader.read(into),
        }
    }
}

impl Write for WriteHalf {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            WriteHalf::Plain(stream) => stream.write(bytes),
            WriteHalf::Tls(writer) => writer.write(bytes),
        }
    }

    fn write_vectored(&mut self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            WriteHalf::Plain(stream) => stream.write_vectored(pieces),
            WriteHalf::Tls(writer) => writer.write_vectored(pieces),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            WriteHalf::Plain(stream) => stream.flush(),
            WriteHalf::Tls(writer) => writer.send_sealed(),
        }
    }
}

/// The session's lock is never held while the socket is read or written, so neither direction waits
/// for the other's network.
fn lock(session: &Mutex<Connection>) -> MutexGuard<'_, Connection> {
    session.lock().unwrap_or_else(PoisonError::into_inner)
}

/// TLS towards us.
#[derive(Debug)]
pub struct TlsReader {
    socket: TcpStream,
    session: Arc<Mutex<Connection>>,
    sealed: Box<[u8]>,
    /// Part of `sealed` that the session has not had yet.
    unread: Range<usize>,
    ended: bool,
}

impl TlsReader {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            if let Some(count) = self.unseal(into)? {
                return Ok(count);
            }
            let count = match self.socket.read(&mut self.sealed) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                answer => answer?,
            };
            self.ended = count == 0;
            self.unread = 0..count;
            if self.ended {
                // Tells the session, which knows whether the peer had said that it would end.
                lock(&self.session).read_tls(&mut io::empty())?;
            }
        }
    }

    /// Plain text from what was received; `None` if that needs more from the socket. The session
    /// holds little plain text, so it gets received bytes only as fast as they are taken.
    fn unseal(&mut self, into: &mut [u8]) -> io::Result<Option<usize>> {
        let mut session = lock(&self.session);
        loop {
            match session.reader().read(into) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && !self.ended => {}
                answer => return answer.map(Some),
            }
            if self.unread.is_empty() {
                return Ok(None);
            }
            let mut sealed = &self.sealed[self.unread.clone()];
            self.unread.start += session.read_tls(&mut sealed)?;
            session.process_new_packets().map_err(io::Error::other)?;
        }
    }
}

/// TLS towards the peer. What the reading side has to say (key updates) leaves with the next write.
#[derive(Debug)]
pub struct TlsWriter {
    socket: TcpStream,
    session: Arc<Mutex<Connection>>,
    sealed: Vec<u8>,
}

impl TlsWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let piece = &bytes[..bytes.len().min(TLS_PIECE)];
        let taken = lock(&self.session).writer().write(piece)?;
        self.send_sealed()?;
        Ok(taken)
    }

    /// As many of the pieces as are given to TLS at once, or the beginning of the first.
    fn write_vectored(&mut self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut bytes = 0;
        let fits = |piece: &&IoSlice<'_>| {
            bytes += piece.len();
            bytes <= TLS_PIECE
        };
        let count = pieces.iter().take_while(fits).count();
        if count == 0 {
            return pieces.first().map_or(Ok(0), |piece| self.write(piece));
        }
        let taken = lock(&self.session).writer().write_vectored(&pieces[..count])?;
        self.send_sealed()?;
        Ok(taken)
    }

    fn send_sealed(&mut self) -> io::Result<()> {
        self.sealed.clear();
        let mut session = lock(&self.session);
        while session.wants_write() {
            session.write_tls(&mut self.sealed)?;
        }
        drop(session);
        self.socket.write_all(&self.sealed)
    }
}
