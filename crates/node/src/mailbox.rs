//! Messages to the thread that owns the guest: it waits for the kernel's news, so a message has to
//! show as a readable descriptor.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use nix::sys::eventfd::{EfdFlags, EventFd};

/// Where messages are dropped.
pub struct Mailbox<T> {
    messages: Sender<T>,
    bell: Arc<EventFd>,
}

impl<T> Clone for Mailbox<T> {
    fn clone(&self) -> Self {
        Self { messages: self.messages.clone(), bell: self.bell.clone() }
    }
}

impl<T> Mailbox<T> {
    /// Drops a message. One whose reader is gone is gone too: the program is about to end.
    pub fn send(&self, message: T) {
        if self.messages.send(message).is_ok() {
            let _ = self.bell.write(1);
        }
    }
}

/// Where messages are taken out.
pub struct Inbox<T> {
    messages: Receiver<T>,
    bell: Arc<EventFd>,
}

impl<T> Inbox<T> {
    /// Readable when there may be a message.
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// The messages that are there.
    pub fn take(&self) -> Vec<T> {
        let _ = self.bell.read();
        self.messages.try_iter().collect()
    }
}

/// Room for a few: whoever wants one more waits until one is given back.
#[derive(Clone)]
pub struct Room(Arc<(Mutex<usize>, Condvar)>);

/// A place taken in a [`Room`], given back when dropped.
pub struct Place(Room);

impl Room {
    /// Room for so many.
    pub fn new(places: usize) -> Self {
        Self(Arc::new((Mutex::new(places), Condvar::new())))
    }

    /// Takes a place, and waits for one if there is none.
    pub fn place(&self) -> Place {
        let (free, changed) = &*self.0;
        let free = free.lock().unwrap_or_else(PoisonError::into_inner);
        let mut free =
            changed.wait_while(free, |free| *free == 0).unwrap_or_else(PoisonError::into_inner);
        *free -= 1;
        Place(self.clone())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let (free, changed) = &*self.0.0;
        *free.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        changed.notify_one();
    }
}

/// A mailbox and its inbox.
pub fn mailbox<T>() -> anyhow::Result<(Mailbox<T>, Inbox<T>)> {
    let (sender, receiver) = channel();
    let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
    let bell = Arc::new(EventFd::from_value_and_flags(0, flags)?);
    Ok((Mailbox { messages: sender, bell: bell.clone() }, Inbox { messages: receiver, bell }))
}
