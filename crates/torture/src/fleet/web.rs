//! What a connection says to a web server: every body is byte for byte what it should be, and a
//! server that counts the requests of a connection counts right.

use std::collections::VecDeque;
use std::sync::Arc;

use super::{Talk, Wrong};
use crate::dice::Dice;

/// What a body must be.
#[derive(Clone, Copy, Debug)]
enum Expected {
    Page,
    /// `PID CONNECTION COUNT`, as `/pid` of `examples/config/nginx.conf` says it.
    Count(u64),
}

/// Gets a page, and the count of its requests if the server tells it.
#[derive(Debug)]
pub struct WebTalk {
    path: &'static str,
    page: Arc<Vec<u8>>,
    counts: bool,
    dice: Dice,
    asked: u64,
    /// The worker and the connection that the server says this is.
    who: Option<String>,
    expected: VecDeque<Expected>,
}

impl WebTalk {
    /// Gets `page` at `path`. With `counts` the server tells at `/pid` how often it was asked.
    pub fn new(path: &'static str, page: Arc<Vec<u8>>, counts: bool, dice: Dice) -> WebTalk {
        WebTalk { path, page, counts, dice, asked: 0, who: None, expected: VecDeque::new() }
    }

    fn judge(&mut self, expected: Expected, body: &[u8]) -> Result<(), Wrong> {
        let said = || String::from_utf8_lossy(&body[..body.len().min(60)]).into_owned();
        let count = match expected {
            Expected::Page if *body == **self.page => return Ok(()),
            Expected::Page => {
                let (found, wanted) = (body.len(), self.page.len());
                let words = format!("a page of {found} bytes, not the one of {wanted}");
                return Err(Wrong::Error(words));
            }
            Expected::Count(count) => count,
        };
        let text = said();
        let (who, found) = text.trim().rsplit_once(' ').unwrap_or_default();
        let found: u64 = found.parse().unwrap_or(0);
        let known = self.who.get_or_insert_with(|| who.to_owned());
        let words = format!("the server says {text:?} to request {count} of {known:?}");
        match found {
            _ if known != who => Err(Wrong::Error(words)),
            found if found < count => Err(Wrong::Lost(count - found, words)),
            found if found > count => Err(Wrong::Duplicate(found - count, words)),
            _ => Ok(()),
        }
    }
}

impl Talk for WebTalk {
    fn ask(&mut self, request: &mut Vec<u8>) {
        self.asked += 1;
        let counts = self.counts && self.dice.chance(0.5);
        let path = if counts { "/pid" } else { self.path };
        let words = format!("GET {path} HTTP/1.1\r\nHost: lab\r\nConnection: keep-alive\r\n\r\n");
        request.extend_from_slice(words.as_bytes());
        let expected = if counts { Expected::Count(self.asked) } else { Expected::Page };
        self.expected.push_back(expected);
    }

    fn hear(&mut self, bytes: &[u8]) -> Option<(usize, Result<(), Wrong>)> {
        let expected = *self.expected.front()?;
        let end = bytes.windows(4).position(|four| four == b"\r\n\r\n")? + 4;
        let head = String::from_utf8_lossy(&bytes[..end]).to_ascii_lowercase();
        let length = head.lines().find_map(|line| line.strip_prefix("content-length:"));
        let length = length.and_then(|length| length.trim().parse::<usize>().ok()).unwrap_or(0);
        let body = bytes.get(end..end.checked_add(length)?)?;
        self.expected.pop_front();
        if !head.starts_with("http/1.1 200 ") {
            let first = head.lines().next().unwrap_or_default().to_owned();
            return Some((end + length, Err(Wrong::Error(first))));
        }
        let judged = self.judge(expected, body);
        Some((end + length, judged))
    }

    fn begins_anew(&mut self) {
        self.expected.clear();
        (self.asked, self.who) = (0, None);
    }
}
