//! AF_UNIX sockets: pairs, named and abstract, with what waits in them.
//!
//! No system call says who is connected to whom; sock_diag(7) does, by inode numbers. Queues are
//! read with `MSG_PEEK` from a peek offset that moves along (`SO_PEEK_OFF`), which leaves them as
//! they are; descriptors in a message are duplicated into us by that, identified, and closed.
//!
//! Restore is in two steps. [`UnixRestore::make`] makes and connects the sockets;
//! [`UnixRestore::finish`] fills queues, which needs every other open file to be there, because
//! messages may carry them.
//!
//! `SO_PEERCRED` names whoever called socketpair(2), connect(2) or listen(2), and nothing else sets
//! it. So pairs are made by the ghost's own processes, ahead ([`wanted_pairs`]). Calls to listeners
//! are ours, made as the right user; the process they name is none.
//!
//! Names that are paths may lie in a directory that this agent serves: whatever looks them up is
//! done by the [`Opener`](hotspare_kernel::opener::Opener).
//!
//! Bytes on a connection that waits in accept(2) cannot be read by anyone. A checkpoint waits until
//! they are accepted, but not for ever: then the connection is reset at a failover.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use hotspare_image::objects::FileId;
use hotspare_image::sockets::{QueuedMessage, SocketAddress, UnixSocket};
use hotspare_image::tree::{GuestPid, HostPath};
use hotspare_kernel::descriptor;
use hotspare_kernel::identity::as_user;
use hotspare_kernel::sock_diag::UnixEntry;
use hotspare_kernel::socket::{self, Message, Outgoing};

use super::error::{ObjectError, ObjectResult};
use super::patience::Patience;
use super::restore::RestoreContext;
use super::socket_options::{Moment, OptionReader, SocketKind, restore_options};

/// Bytes of the family in front of a name.
const FAMILY_BYTES: usize = 2;
/// `UNIX_DIAG` states (net/tcp_states.h).
const STATE_CONNECTED: u8 = 1;
const STATE_LISTENING: u8 = 10;
/// Longest datagram that is looked for; the default of `wmem_max` is 208 KiB.
const DATAGRAM_BYTES_MAX: usize = 1 << 20;
/// Most messages in one queue.
const MESSAGES_MAX: usize = 100_000;

/// What sockets need to know of the guest around them.
pub trait GuestView {
    /// The guest's number of a process, given the host's; 0 for one outside of the guest.
    fn guest_pid(&self, host: i32) -> GuestPid;

    /// A path of ours that leads to the guest's root directory, such as `/proc/4711/root`.
    fn root(&self) -> PathBuf;

    /// Working directories of the guest's processes: a socket may be bound to a relative path.
    fn working_directories(&self) -> Vec<HostPath>;
}

/// Names a file that was found in a queue. It becomes part of the checkpoint if no process of the
/// guest has it open any more.
pub type InFlight<'a> = &'a mut dyn FnMut(OwnedFd) -> ObjectResult<FileId>;

/// Captures an AF_UNIX socket of the stopped guest. `all` is what sock_diag(7) says about the
/// guest's network namespace at this stop.
pub fn capture(
    fd: BorrowedFd<'_>,
    inode: u64,
    all: &HashMap<u64, UnixEntry>,
    options: &mut OptionReader,
    patience: &mut Patience,
    guest: &dyn GuestView,
    in_flight: InFlight<'_>,
) -> ObjectResult<UnixSocket> {
    let foreign;
    let entry = match all.get(&(inode & u64::from(u32::MAX))) {
        Some(entry) => entry,
        None => {
            foreign = accepted_from_outside(fd, inode)?;
            &foreign
        }
    };
    let address = address_of(entry);
    let path = address.as_ref().and_then(|address| path_of(address, entry, guest));
    let listening = entry.state == STATE_LISTENING;
    let remote = remote(fd, entry, all)?;
    let queue = if listening { Vec::new() } else { queue(fd, entry, guest, in_flight)? };
    let waits = entry.state == STATE_CONNECTED && waits_in_accept(entry, all);
    let reset = waits && entry.send_queue > 0;
    if reset && !patience.is_exhausted() {
        let reason = "bytes were sent on a connection that is not accepted yet";
        return Err(ObjectError::transient(format!("UNIX socket {inode}"), reason));
    }
    let maker = if waits { Some(descriptor::stat(fd)?.owner) } else { None };
    let connected = !listening && is_connected(fd, entry);
    let kind = SocketKind { domain: libc::AF_UNIX, kind: entry.kind, protocol: 0 };
    Ok(UnixSocket {
        inode,
        kind: entry.kind,
        address,
        path,
        backlog: listening.then_some(entry.send_queue as i32),
        waiting: if listening { known(&entry.waiting, all) } else { Vec::new() },
        peer: entry.peer.filter(|peer| all.contains_key(peer)),
        queue,
        shutdown: entry.shutdown,
        options: options.capture(fd, inode, kind, !listening)?,
        connected,
        remote,
        peer_credentials: if connected || listening { credentials(fd, guest)? } else { None },
        maker,
        reset,
    })
}

fn credentials(
    fd: BorrowedFd<'_>,
    guest: &dyn GuestView,
) -> ObjectResult<Option<(GuestPid, u32, u32)>> {
    let credentials = socket::peer_credentials(fd)?;
    Ok(credentials.map(|(pid, uid, gid)| (guest.guest_pid(pid), uid, gid)))
}

/// Its name with the family in front, as bind(2) takes it.
fn address_of(entry: &UnixEntry) -> Option<SocketAddress> {
    let family = (libc::AF_UNIX as u16).to_ne_bytes();
    let named = !entry.name.is_empty();
    named.then(|| SocketAddress([&family[..], &entry.name].concat()))
}

/// A socket in the network namespace of the process that called it: a client outside of the guest
/// called one of its listeners. To the guest that client is gone after a failover.
fn accepted_from_outside(fd: BorrowedFd<'_>, inode: u64) -> ObjectResult<UnixEntry> {
    let name = socket::local_address(fd)?.split_off(FAMILY_BYTES);
    let kind = socket::get_option_i32(fd, libc::SOL_SOCKET, libc::SO_TYPE)?;
    if name.is_empty() || kind == libc::SOCK_DGRAM || socket::peer_address(fd).is_err() {
        let reason = "it belongs to another network namespace; do not hand it to the guest";
        return Err(ObjectError::refused(format!("UNIX socket {inode}"), reason));
    }
    let receive_queue = socket::unread_bytes(fd)? as u32;
    let state = STATE_CONNECTED;
    Ok(UnixEntry { inode, kind, state, name, receive_queue, ..UnixEntry::default() })
}

/// A datagram socket counts as connected in sock_diag(7) when somebody connected to *it*.
fn is_connected(fd: BorrowedFd<'_>, entry: &UnixEntry) -> bool {
    match entry.kind {
        libc::SOCK_DGRAM => socket::peer_address(fd).is_ok(),
        _ => entry.state == STATE_CONNECTED,
    }
}

/// Checks, when all sockets of the guest are captured, that nobody is connected to a socket that
/// is not among them. `sockets` are all of the checkpoint.
///
/// Only now it is known what lies outside: the socket that a server outside of the guest got from
/// accept(2) belongs to the network namespace of its client, so sock_diag(7) lists it as ours.
pub fn settle(sockets: &mut [&mut UnixSocket]) -> ObjectResult<()> {
    let ours: HashSet<u64> = sockets.iter().map(|image| image.inode).collect();
    let reset: HashSet<u64> =
        sockets.iter().filter(|image| image.reset).map(|image| image.inode).collect();
    for image in sockets {
        image.waiting.retain(|client| ours.contains(client) && !reset.contains(client));
        let Some(peer) = image.peer.filter(|peer| !ours.contains(peer)) else { continue };
        if image.kind == libc::SOCK_DGRAM && image.remote.is_some() || image.address.is_some() {
            image.peer = None;
            continue;
        }
        let what = format!("UNIX socket {}", image.inode);
        let reason = format!("it is connected to a server outside of the guest (socket {peer})");
        return Err(ObjectError::refused(what, reason));
    }
    Ok(())
}

fn waits_in_accept(entry: &UnixEntry, all: &HashMap<u64, UnixEntry>) -> bool {
    entry.peer.is_none() && all.values().any(|other| other.waiting.contains(&entry.inode))
}

fn known(inodes: &[u64], all: &HashMap<u64, UnixEntry>) -> Vec<u64> {
    inodes.iter().copied().filter(|inode| all.contains_key(inode)).collect()
}

/// The file in the guest that the socket is bound to; none for an abstract name, and where the
/// file has been removed or replaced.
fn path_of(address: &SocketAddress, entry: &UnixEntry, guest: &dyn GuestView) -> Option<HostPath> {
    let name = file_name(address)?;
    let inode = entry.file_inode?;
    let directories = match name.is_absolute() {
        true => vec![HostPath("/".into())],
        false => guest.working_directories(),
    };
    let candidates = directories.iter().map(|directory| Path::new(&directory.0).join(name));
    let root = guest.root();
    let here = |path: &PathBuf| {
        let outside = root.join(path.strip_prefix("/").unwrap_or(path));
        std::fs::metadata(outside).is_ok_and(|found| found.ino() as u32 == inode)
    };
    let path = candidates.into_iter().find(here)?;
    Some(HostPath(path.to_str()?.to_owned()))
}

/// The path in an address; none for an abstract name.
fn file_name(address: &SocketAddress) -> Option<&Path> {
    let name = address.0.get(FAMILY_BYTES..).filter(|name| name.first() != Some(&0))?;
    let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
    Some(Path::new(std::ffi::OsStr::from_bytes(&name[..end])))
}

/// Checks whom the socket is connected to. A server outside of the guest can be called again
/// only where no state is lost by that: datagrams to a name, such as the system log.
fn remote(
    fd: BorrowedFd<'_>,
    entry: &UnixEntry,
    all: &HashMap<u64, UnixEntry>,
) -> ObjectResult<Option<SocketAddress>> {
    let Some(peer) = entry.peer else { return Ok(None) };
    if entry.kind != libc::SOCK_DGRAM && all.contains_key(&peer) {
        return Ok(None);
    }
    let what = || format!("UNIX socket {}", entry.inode);
    let remote = socket::peer_address(fd).unwrap_or_default();
    let remote = Some(SocketAddress(remote)).filter(|address| address.0.len() > FAMILY_BYTES);
    let named = remote
        .as_ref()
        .map(|address| String::from_utf8_lossy(&address.0[FAMILY_BYTES..]).replace('\0', "@"));
    match all.get(&peer) {
        Some(other) if entry.kind == libc::SOCK_DGRAM => {
            if other.name.is_empty() && other.peer != Some(entry.inode) {
                let reason = "it sends to a socket that has no name and is connected elsewhere";
                return Err(ObjectError::refused(what(), reason));
            }
            Ok(remote)
        }
        Some(_) => Ok(None),
        None if entry.kind == libc::SOCK_DGRAM && remote.is_some() => Ok(remote),
        // A client outside of the guest called one of its listeners: it has to call again.
        None if !entry.name.is_empty() => Ok(None),
        None => {
            let server = named.unwrap_or_else(|| "without a name".into());
            let reason = format!("it is connected to a socket outside of the guest ({server})");
            Err(ObjectError::refused(what(), reason))
        }
    }
}

/// Everything that waits in a socket, oldest first; it stays there.
fn queue(
    fd: BorrowedFd<'_>,
    entry: &UnixEntry,
    guest: &dyn GuestView,
    in_flight: InFlight<'_>,
) -> ObjectResult<Vec<QueuedMessage>> {
    let stream = entry.kind == libc::SOCK_STREAM;
    let empty = match stream {
        true => entry.receive_queue == 0,
        false => socket::poll_now(fd, libc::POLLIN)? & libc::POLLIN == 0,
    };
    if empty {
        return Ok(Vec::new());
    }
    let (level, name) = (libc::SOL_SOCKET, libc::SO_PEEK_OFF);
    let offset = socket::get_option_i32(fd, level, name)?;
    socket::set_option_i32(fd, level, name, 0)?;
    let messages = peek_messages(fd, entry);
    socket::set_option_i32(fd, level, name, offset)?;
    messages?.into_iter().map(|message| describe(message, guest, in_flight)).collect()
}

fn peek_messages(fd: BorrowedFd<'_>, entry: &UnixEntry) -> ObjectResult<Vec<Message>> {
    let what = || format!("UNIX socket {}", entry.inode);
    let stream = entry.kind == libc::SOCK_STREAM;
    let capacity = if stream { entry.receive_queue as usize } else { DATAGRAM_BYTES_MAX };
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    let mut messages = Vec::new();
    while let Some(message) = socket::receive_message(fd, capacity, flags)? {
        // A stream has ended; a shut down packet socket gives empty messages for ever.
        let nothing = message.bytes.is_empty() && message.files.is_empty();
        if nothing && (stream || entry.shutdown & 1 != 0) {
            break;
        }
        if message.flags & libc::MSG_CTRUNC != 0 {
            let reason = "descriptors in its queue could not be taken: raise our limit of files";
            return Err(ObjectError::transient(what(), reason));
        }
        if message.flags & libc::MSG_TRUNC != 0 || messages.len() == MESSAGES_MAX {
            return Err(ObjectError::refused(what(), "more waits in it than a checkpoint takes"));
        }
        messages.push(message);
    }
    Ok(messages)
}

fn describe(
    message: Message,
    guest: &dyn GuestView,
    in_flight: InFlight<'_>,
) -> ObjectResult<QueuedMessage> {
    let files = message.files.into_iter().map(in_flight);
    let files = files.collect::<ObjectResult<Vec<_>>>()?;
    let credentials = message.credentials.map(|(pid, uid, gid)| (guest.guest_pid(pid).0, uid, gid));
    let from = Some(SocketAddress(message.from)).filter(|from| from.0.len() > FAMILY_BYTES);
    Ok(QueuedMessage { from, bytes: message.bytes, files, credentials })
}

/// Restored open files by name.
pub type Made = BTreeMap<FileId, OwnedFd>;

/// A socket pair that a process of the ghost is to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WantedPair {
    /// The process, and its user and group at that time.
    pub maker: (GuestPid, u32, u32),
    /// `SOCK_*`.
    pub kind: i32,
    /// Inode number on the primary of the end that comes first.
    pub inode: u64,
}

/// Pairs by [`WantedPair::inode`].
pub type SocketPairs = BTreeMap<u64, (OwnedFd, OwnedFd)>;

/// The pairs among `sockets` that remember who made them.
pub fn wanted_pairs<'a>(sockets: impl Iterator<Item = &'a UnixSocket>) -> Vec<WantedPair> {
    let paired = sockets.filter(|image| {
        let first = image.peer.is_none_or(|peer| image.inode < peer);
        image.connected && image.address.is_none() && image.remote.is_none() && first
    });
    let wanted = paired.filter_map(|image| {
        let maker = image.peer_credentials.filter(|maker| maker.0 != GuestPid(0))?;
        Some(WantedPair { maker, kind: image.kind, inode: image.inode })
    });
    wanted.collect()
}

/// Restores all AF_UNIX sockets of a checkpoint.
pub struct UnixRestore<'a> {
    context: &'a RestoreContext<'a>,
    images: BTreeMap<u64, (FileId, &'a UnixSocket)>,
    made: BTreeMap<u64, OwnedFd>,
    pairs: SocketPairs,
    /// Other ends of sockets whose peer had closed, until their queues are filled.
    closed_peers: BTreeMap<u64, OwnedFd>,
}

/// What [`UnixRestore::make`] leaves for [`UnixUnfinished::finish`].
pub struct UnixUnfinished<'a> {
    context: &'a RestoreContext<'a>,
    closed_peers: BTreeMap<u64, OwnedFd>,
}

impl<'a> UnixRestore<'a> {
    /// Makes the sockets, bound and connected among each other, in the calling thread's network
    /// and mount namespaces. A file that a socket was bound to is replaced.
    ///
    /// The thread must not share its working directory with others (`CLONE_FS`).
    pub fn make(
        sockets: impl IntoIterator<Item = (FileId, &'a UnixSocket)>,
        pairs: SocketPairs,
        context: &'a RestoreContext<'a>,
    ) -> ObjectResult<(Made, UnixUnfinished<'a>)> {
        let images = sockets.into_iter().map(|(id, image)| (image.inode, (id, image)));
        let images: BTreeMap<_, _> = images.collect();
        let (made, closed_peers) = Default::default();
        let mut restore = Self { context, images, made, pairs, closed_peers };
        let all: Vec<&UnixSocket> = restore.images.values().map(|(_, image)| *image).collect();
        for image in all.iter().filter(|image| image.backlog.is_some()) {
            restore.listener(image)?;
        }
        for image in &all {
            restore.connection(image)?;
        }
        for image in all.iter().filter(|image| image.backlog.is_some()) {
            restore.waiting(image)?;
        }
        let Self { images, made, closed_peers, .. } = restore;
        let named = made.into_iter().filter_map(|(inode, fd)| Some((images.get(&inode)?.0, fd)));
        Ok((named.collect(), UnixUnfinished { context, closed_peers }))
    }

    fn listener(&mut self, image: &UnixSocket) -> ObjectResult<()> {
        let fd = bound(image, self.context)?;
        let backlog = image.backlog.unwrap_or(0);
        as_peer(image.peer_credentials, || socket::listen(fd.as_fd(), backlog))??;
        self.made.insert(image.inode, fd);
        Ok(())
    }

    fn connection(&mut self, image: &UnixSocket) -> ObjectResult<()> {
        let accepting = |(_, other): &&(FileId, &UnixSocket)| other.waiting.contains(&image.inode);
        if self.made.contains_key(&image.inode) || self.images.values().find(accepting).is_some() {
            return Ok(());
        }
        let peer = image.peer.and_then(|peer| self.images.get(&peer)).map(|(_, peer)| *peer);
        if image.kind == libc::SOCK_DGRAM {
            return self.datagram(image, peer);
        }
        if !image.connected {
            self.made.insert(image.inode, bound(image, self.context)?);
            return Ok(());
        }
        let (ours, theirs) = self.pair(image, peer)?;
        restore_options(ours.as_fd(), &image.options, Moment::Created)?;
        match peer {
            Some(peer) => {
                restore_options(theirs.as_fd(), &peer.options, Moment::Created)?;
                self.made.insert(peer.inode, theirs);
            }
            None => {
                self.closed_peers.insert(image.inode, theirs);
            }
        }
        self.made.insert(image.inode, ours);
        Ok(())
    }

    /// Two connected sockets without names.
    fn nameless(&mut self, image: &UnixSocket) -> ObjectResult<(OwnedFd, OwnedFd)> {
        match self.pairs.remove(&image.inode) {
            Some(pair) => Ok(pair),
            None => {
                Ok(as_peer(image.peer_credentials, || socket::pair(libc::AF_UNIX, image.kind))??)
            }
        }
    }

    /// Two connected sockets: the first with the name of `image`, the second with its peer's.
    fn pair(
        &mut self,
        image: &UnixSocket,
        peer: Option<&UnixSocket>,
    ) -> ObjectResult<(OwnedFd, OwnedFd)> {
        let name = |socket: Option<&UnixSocket>| socket.and_then(|socket| socket.address.clone());
        let (mine, theirs) = (name(Some(image)), name(peer));
        if mine.is_none() && theirs.is_none() {
            return self.nameless(image);
        }
        // The end that was accepted has the name of its listener.
        let listens = |name: &Option<SocketAddress>| {
            name.is_some() && self.listener_named(name.as_ref()).is_some()
        };
        let image_accepted = listens(&mine) || (!listens(&theirs) && theirs.is_none());
        let (server, client) = match image_accepted {
            true => (image, peer),
            false => (peer.unwrap_or(image), Some(image)),
        };
        let (accepted, called) = self.call(server, client)?;
        Ok(if image_accepted { (accepted, called) } else { (called, accepted) })
    }

    fn listener_named(&self, name: Option<&SocketAddress>) -> Option<BorrowedFd<'_>> {
        let mut sockets = self.images.values();
        let (_, found) =
            sockets.find(|(_, other)| other.backlog.is_some() && other.address.as_ref() == name)?;
        Some(self.made.get(&found.inode)?.as_fd())
    }

    /// Connects `client` to the listener whose name `server` has, or to one that lives only for
    /// this call.
    fn call(
        &self,
        server: &UnixSocket,
        client: Option<&UnixSocket>,
    ) -> ObjectResult<(OwnedFd, OwnedFd)> {
        let name = server
            .address
            .as_ref()
            .ok_or_else(|| ObjectError::Image("an accepted UNIX socket without a name".into()))?;
        let caller = match client {
            Some(client) if client.address.is_some() => bound(client, self.context)?,
            _ => socket::create(libc::AF_UNIX, server.kind, 0)?,
        };
        if let Some(listener) = self.listener_named(Some(name)) {
            let path = self.listener_path(name);
            connect(caller.as_fd(), name, path, server.peer_credentials, self.context)?;
            return Ok((socket::accept(listener)?, caller));
        }
        let mut temporary = server.clone();
        temporary.options.clear();
        let listener = bound(&temporary, self.context)?;
        let of_listener = client.and_then(|client| client.peer_credentials);
        as_peer(of_listener, || socket::listen(listener.as_fd(), 1))??;
        let path = server.path.as_ref();
        connect(caller.as_fd(), name, path, server.peer_credentials, self.context)?;
        Ok((socket::accept(listener.as_fd())?, caller))
    }

    fn listener_path(&self, name: &SocketAddress) -> Option<&HostPath> {
        let listening =
            |other: &&UnixSocket| other.backlog.is_some() && other.address.as_ref() == Some(name);
        let mut sockets = self.images.values().map(|(_, image)| *image);
        sockets.find(listening)?.path.as_ref()
    }

    fn datagram(&mut self, image: &UnixSocket, peer: Option<&UnixSocket>) -> ObjectResult<()> {
        let paired = peer.filter(|peer| {
            let mutual = peer.peer == Some(image.inode);
            mutual && image.address.is_none() && peer.address.is_none()
        });
        if let Some(peer) = paired {
            let (ours, theirs) = self.nameless(image)?;
            restore_options(ours.as_fd(), &image.options, Moment::Created)?;
            restore_options(theirs.as_fd(), &peer.options, Moment::Created)?;
            self.made.insert(peer.inode, theirs);
            self.made.insert(image.inode, ours);
        } else if image.connected && image.peer.is_none() && image.remote.is_none() {
            let (ours, theirs) = self.nameless(image)?;
            restore_options(ours.as_fd(), &image.options, Moment::Created)?;
            self.closed_peers.insert(image.inode, theirs);
            self.made.insert(image.inode, ours);
        } else {
            self.made.insert(image.inode, bound(image, self.context)?);
        }
        Ok(())
    }

    /// Puts the sockets that waited in accept(2) back on the listener's queue.
    fn waiting(&mut self, listener: &UnixSocket) -> ObjectResult<()> {
        let Some(name) = &listener.address else { return Ok(()) };
        for inode in &listener.waiting {
            let Some((_, client)) = self.images.get(inode) else { continue };
            let fd = bound(client, self.context)?;
            let path = listener.path.as_ref();
            let maker = client.maker.map(|(uid, gid)| (GuestPid(0), uid, gid));
            connect(fd.as_fd(), name, path, maker, self.context)?;
            self.made.insert(*inode, fd);
        }
        Ok(())
    }
}

/// Makes a call that leaves its mark as the user of `credentials`.
fn as_peer<T>(
    credentials: Option<(GuestPid, u32, u32)>,
    call: impl FnOnce() -> T,
) -> ObjectResult<T> {
    let (_, uid, gid) = credentials.unwrap_or_default();
    Ok(as_user(uid, gid, call)?)
}

/// A socket with its options and its name.
fn bound(image: &UnixSocket, context: &RestoreContext<'_>) -> ObjectResult<OwnedFd> {
    let fd = socket::create(libc::AF_UNIX, image.kind, 0)?;
    restore_options(fd.as_fd(), &image.options, Moment::Created)?;
    let Some(address) = &image.address else { return Ok(fd) };
    let Some(name) = file_name(address) else {
        socket::bind(fd.as_fd(), &address.0).map_err(|source| named("bind", address, source))?;
        return Ok(fd);
    };
    if image.path.is_none() && !name.is_absolute() {
        let reason = "its file is gone, and it had a relative name";
        return Err(ObjectError::refused(format!("UNIX socket {}", image.inode), reason));
    }
    let (address, path) = (address.clone(), image.path.clone());
    context.aside(fd.as_fd(), move |fd| bind_to_file(fd, &address, path.as_ref()))?;
    Ok(fd)
}

/// Binds a socket to a file, which takes the place of the one that is there. Without a path that
/// was gone already: it is made for a moment.
fn bind_to_file(
    fd: BorrowedFd<'_>,
    address: &SocketAddress,
    image_path: Option<&HostPath>,
) -> ObjectResult<()> {
    let name = file_name(address).unwrap_or(Path::new(""));
    let path = image_path.map_or(name, |path| Path::new(&path.0));
    let before = std::fs::symlink_metadata(path).ok();
    if before.is_some() && image_path.is_none() {
        // Somebody else's file now.
        return Ok(());
    }
    if before.as_ref().is_some_and(|file| file.file_type().is_socket()) {
        std::fs::remove_file(path).map_err(io("replace socket file", path))?;
    }
    at(address, image_path, |address| socket::bind(fd, address))?;
    match (before, image_path) {
        (Some(before), Some(_)) => {
            let mode = std::fs::Permissions::from_mode(before.mode() & 0o7777);
            std::fs::set_permissions(path, mode).map_err(io("set mode of", path))?;
            let (uid, gid) = (Some(before.uid()), Some(before.gid()));
            std::os::unix::fs::chown(path, uid, gid).map_err(io("set owner of", path))
        }
        (_, None) => std::fs::remove_file(path).map_err(io("remove socket file", path)),
        (None, Some(_)) => Ok(()),
    }
}

/// Connects a socket to the name of another, as the user of `credentials`.
fn connect(
    fd: BorrowedFd<'_>,
    address: &SocketAddress,
    path: Option<&HostPath>,
    credentials: Option<(GuestPid, u32, u32)>,
    context: &RestoreContext<'_>,
) -> ObjectResult<()> {
    let (address, path) = (address.clone(), path.cloned());
    let is_file = file_name(&address).is_some();
    let connect = move |fd: BorrowedFd<'_>| {
        let call = || at(&address, path.as_ref(), |address| socket::connect(fd, address));
        as_peer(credentials, call)?
    };
    if is_file { context.aside(fd, connect) } else { connect(fd) }
}

fn io(verb: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> ObjectError {
    let what = format!("{verb} {}", path.display());
    move |source| {
        let source = hotspare_kernel::KernelError::Call { verb, source };
        ObjectError::Kernel { what, source }
    }
}

fn named(verb: &str, address: &SocketAddress, source: hotspare_kernel::KernelError) -> ObjectError {
    let name = String::from_utf8_lossy(&address.0[FAMILY_BYTES.min(address.0.len())..]);
    let what = format!("{verb} UNIX socket {}", name.replace('\0', "@"));
    ObjectError::Kernel { what, source }
}

/// Calls with an address; from the directory in which a relative one makes sense.
fn at(
    address: &SocketAddress,
    path: Option<&HostPath>,
    call: impl FnOnce(&[u8]) -> hotspare_kernel::Result<()>,
) -> ObjectResult<()> {
    let relative = file_name(address).filter(|name| name.is_relative());
    let directory = relative.zip(path).and_then(|(name, path)| {
        let parts = name.components().count();
        Path::new(&path.0).ancestors().nth(parts)
    });
    if let Some(directory) = directory {
        std::env::set_current_dir(directory).map_err(io("enter", directory))?;
    }
    let done = call(&address.0).map_err(|source| named("bind or connect", address, source));
    if directory.is_some() {
        let root = Path::new("/");
        std::env::set_current_dir(root).map_err(io("enter", root))?;
    }
    done
}

/// Our number of a process of the ghost; none for one that is gone.
pub type HostPidOf<'a> = &'a dyn Fn(GuestPid) -> Option<i32>;

impl UnixUnfinished<'_> {
    /// Fills the queues, then does what would have stood in the way: connects datagram sockets,
    /// shuts down, closes peers that were closed, sets the last options.
    pub fn finish(
        mut self,
        sockets: &[(FileId, &UnixSocket)],
        made: &Made,
        host_pid: HostPidOf<'_>,
    ) -> ObjectResult<()> {
        let by_inode: BTreeMap<u64, (FileId, &UnixSocket)> =
            sockets.iter().map(|(id, image)| (image.inode, (*id, *image))).collect();
        for (_, image) in sockets {
            self.fill(image, &by_inode, made, host_pid)?;
        }
        for (id, image) in sockets {
            let fd = file(made, *id)?;
            if let (libc::SOCK_DGRAM, Some(remote)) = (image.kind, &image.remote) {
                // A server outside may be missing here: the guest sees that when it sends.
                let peer = image.peer.and_then(|peer| by_inode.get(&peer));
                let path = peer.and_then(|(_, peer)| peer.path.as_ref());
                let _ = connect(fd, remote, path, None, self.context);
            }
            let peer = self.closed_peers.remove(&image.inode);
            if image.reset && peer.is_some() {
                // A byte that the other end closes on unread makes this end see a reset.
                socket::send(fd, b"x", libc::MSG_DONTWAIT)?;
            }
            drop(peer);
            for (bit, how) in [(1, libc::SHUT_RD), (2, libc::SHUT_WR)] {
                if image.shutdown & bit != 0 && image.backlog.is_none() {
                    // Already so where the peer is closed.
                    let _ = socket::shutdown(fd, how);
                }
            }
            restore_options(fd, &image.options, Moment::InPlace)?;
        }
        Ok(())
    }

    fn fill(
        &self,
        image: &UnixSocket,
        by_inode: &BTreeMap<u64, (FileId, &UnixSocket)>,
        made: &Made,
        host_pid: HostPidOf<'_>,
    ) -> ObjectResult<()> {
        for message in &image.queue {
            let sender = self.sender(image, message, by_inode, made)?;
            let files = message.files.iter().map(|id| file(made, *id));
            let files = files.collect::<ObjectResult<Vec<_>>>()?;
            let pid = |guest| host_pid(GuestPid(guest)).unwrap_or(1);
            let connected = image.kind != libc::SOCK_DGRAM
                || self.closed_peers.contains_key(&image.inode)
                || image.address.is_none();
            let to = image.address.as_ref().filter(|_| !connected);
            let outgoing = Outgoing {
                bytes: &message.bytes,
                to: to.map(|address| &address.0[..]),
                files: &files,
                credentials: message.credentials.map(|(guest, uid, gid)| (pid(guest), uid, gid)),
            };
            deliver(sender.as_fd(), image, outgoing)?;
        }
        Ok(())
    }

    /// The socket a message came from, or one that is as good.
    fn sender(
        &self,
        image: &UnixSocket,
        message: &QueuedMessage,
        by_inode: &BTreeMap<u64, (FileId, &UnixSocket)>,
        made: &Made,
    ) -> ObjectResult<OwnedFd> {
        let copy = |fd: BorrowedFd<'_>| {
            let what = Path::new("sender");
            fd.try_clone_to_owned().map_err(io("duplicate", what))
        };
        if let Some(peer) = self.closed_peers.get(&image.inode) {
            return copy(peer.as_fd());
        }
        let peer = image.peer.and_then(|peer| by_inode.get(&peer));
        let named = by_inode.values().find(|(_, other)| {
            message.from.is_some() && other.address == message.from && other.backlog.is_none()
        });
        match (image.kind, peer, named) {
            (libc::SOCK_DGRAM, _, Some((id, _))) => copy(file(made, *id)?),
            (libc::SOCK_DGRAM, Some((id, peer)), None) if peer.peer == Some(image.inode) => {
                copy(file(made, *id)?)
            }
            (libc::SOCK_DGRAM, _, None) => Ok(socket::create(libc::AF_UNIX, image.kind, 0)?),
            (_, Some((id, _)), _) => copy(file(made, *id)?),
            (_, None, _) => Err(ObjectError::Image("bytes in a socket without a peer".into())),
        }
    }
}

fn file(made: &Made, id: FileId) -> ObjectResult<BorrowedFd<'_>> {
    let missing = || ObjectError::Image(format!("open file {id} is missing"));
    made.get(&id).map(AsFd::as_fd).ok_or_else(missing)
}

/// Sends one message, with room made for it and taken back.
fn deliver(sender: BorrowedFd<'_>, image: &UnixSocket, message: Outgoing<'_>) -> ObjectResult<()> {
    let (level, force) = (libc::SOL_SOCKET, libc::SO_SNDBUFFORCE);
    let room = socket::get_option_i32(sender, level, libc::SO_SNDBUF)?;
    let queued: usize = image.queue.iter().map(|message| message.bytes.len() + 1024).sum();
    let needed = queued.saturating_mul(2).min(i32::MAX as usize / 4) as i32;
    if room < needed {
        socket::set_option_i32(sender, level, force, needed)?;
    }
    let mut rest = message;
    loop {
        let what = format!("refill UNIX socket {}", image.inode);
        let taken = socket::send_message(sender, rest).map_err(ObjectError::kernel(what))?;
        rest.bytes = &rest.bytes[taken.min(rest.bytes.len())..];
        rest.files = &[];
        if rest.bytes.is_empty() || taken == 0 {
            break;
        }
    }
    if room < needed {
        socket::set_option_i32(sender, level, force, room / 2)?;
    }
    Ok(())
}
