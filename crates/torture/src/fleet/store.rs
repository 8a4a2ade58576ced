//! What a connection says to a key-value server, about keys that are its own: so every reply is
//! known beforehand. A counter shows what was lost or done twice, a list also in which order.

use std::collections::VecDeque;

use super::{Talk, Wrong};
use crate::clients::{Protocol, resp};
use crate::dice::Dice;

/// A list is read and begun anew at this length.
const LIST_MAX: usize = 24;

/// What a reply must be.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Reply {
    Done,
    Number(u64),
    Text(String),
    Items(Vec<u64>),
}

#[derive(Clone, Debug)]
struct Expected {
    what: &'static str,
    /// The exact reply, or nothing if it is taken as it comes.
    reply: Reply,
    /// A counter may have any value from this to the one in `reply`.
    least: Option<u64>,
    is_judged: bool,
}

/// One connection's keys.
#[derive(Debug)]
pub struct StoreTalk {
    protocol: Protocol,
    name: String,
    dice: Dice,
    /// Keys are new ones after something went wrong.
    generation: u32,
    register: Option<String>,
    writes: u64,
    counter: u64,
    /// The highest count that was acknowledged.
    counted: u64,
    list: Vec<u64>,
    /// The full list has been read and can go.
    is_read: bool,
    begun: bool,
    expected: VecDeque<Expected>,
    /// Counters of broken connections, with the least and the most they can have.
    to_look_at: Vec<(String, u64, u64)>,
}

impl StoreTalk {
    /// A connection with this name, which is in its keys.
    pub fn new(protocol: Protocol, name: String, dice: Dice) -> StoreTalk {
        StoreTalk {
            protocol,
            name,
            dice,
            generation: 0,
            register: None,
            writes: 0,
            counter: 0,
            counted: 0,
            list: Vec::new(),
            is_read: false,
            begun: false,
            expected: VecDeque::new(),
            to_look_at: Vec::new(),
        }
    }

    fn key(&self, kind: char) -> String {
        format!("{}:{}{kind}", self.name, self.generation)
    }

    /// Mostly small, now and then many segments.
    fn value(&mut self) -> String {
        self.writes += 1;
        let bytes = match self.dice.below(100) {
            0..=1 => 40_000,
            2..=9 => 2_000,
            _ => 64,
        };
        let mut value = format!("{}:{}:", self.writes, self.key('r'));
        let letter = char::from(b'a' + (self.writes % 26) as u8);
        value.extend(std::iter::repeat_n(letter, bytes - value.len().min(bytes)));
        value
    }

    fn expect(&mut self, what: &'static str, reply: Reply) {
        self.expected.push_back(Expected { what, reply, least: None, is_judged: true });
    }

    fn set(&mut self, out: &mut Vec<u8>) {
        let (key, value) = (self.key('r'), self.value());
        self.protocol.put_set(out, &key, &value);
        self.register = Some(value);
        self.expect("set", Reply::Done);
    }

    fn get(&mut self, value: String, out: &mut Vec<u8>) {
        self.protocol.put_get(out, &self.key('r'));
        self.expect("get", Reply::Text(value));
    }

    fn increment(&mut self, out: &mut Vec<u8>) {
        let key = self.key('c');
        out.extend_from_slice(self.increment_words(&key).as_bytes());
        self.counter += 1;
        self.expect("increment", Reply::Number(self.counter));
    }

    fn increment_words(&self, key: &str) -> String {
        match self.protocol {
            Protocol::Redis => resp(&["INCR", key]),
            Protocol::Memcached => format!("incr {key} 1\r\n"),
            Protocol::Line | Protocol::HttpStore | Protocol::Tarantool => format!("INCR {key}\n"),
        }
    }

    /// Appends an item; or, if there are many, reads all and begins anew.
    fn append(&mut self, out: &mut Vec<u8>) {
        let key = self.key('l');
        let is_full = self.list.len() >= LIST_MAX;
        match (self.protocol, is_full) {
            (Protocol::Redis, false) => {
                self.writes += 1;
                let item = self.writes.to_string();
                out.extend_from_slice(resp(&["RPUSH", &key, &item]).as_bytes());
                self.list.push(self.writes);
                self.expect("push", Reply::Number(self.list.len() as u64));
            }
            (Protocol::Redis, true) if self.is_read => {
                out.extend_from_slice(resp(&["DEL", &key]).as_bytes());
                self.expect("delete", Reply::Number(1));
                self.list.clear();
                self.is_read = false;
            }
            (Protocol::Redis, true) => {
                out.extend_from_slice(resp(&["LRANGE", &key, "0", "-1"]).as_bytes());
                self.expect("range", Reply::Items(self.list.clone()));
                self.is_read = true;
            }
            (Protocol::Memcached, false) if !self.list.is_empty() => {
                self.writes += 1;
                let item = format!(",{}", self.writes);
                let words = format!("append {key} 0 0 {}\r\n{item}\r\n", item.len());
                out.extend_from_slice(words.as_bytes());
                self.list.push(self.writes);
                self.expect("append", Reply::Done);
            }
            (Protocol::Memcached, true) => {
                self.protocol.put_get(out, &key);
                let items: Vec<String> = self.list.iter().map(u64::to_string).collect();
                self.expect("get list", Reply::Text(items.join(",")));
                self.list.clear();
            }
            (Protocol::Memcached, false) => {
                self.writes += 1;
                self.protocol.put_set(out, &key, &self.writes.to_string());
                self.list.push(self.writes);
                self.expect("set list", Reply::Done);
            }
            (Protocol::Line | Protocol::HttpStore | Protocol::Tarantool, _) => self.increment(out),
        }
    }

    /// Memcached counts only what is there.
    fn begin(&mut self, out: &mut Vec<u8>) -> bool {
        if std::mem::replace(&mut self.begun, true) || self.protocol != Protocol::Memcached {
            return false;
        }
        let key = self.key('c');
        self.protocol.put_set(out, &key, "0");
        self.expect("set counter", Reply::Done);
        true
    }

    /// What was said on keys of before is not known any more.
    fn new_keys(&mut self) {
        self.generation += 1;
        (self.register, self.counter, self.counted, self.begun) = (None, 0, 0, false);
        self.list.clear();
        self.is_read = false;
        self.expected.iter_mut().for_each(|expected| expected.is_judged = false);
    }

    /// The reply at the front of `bytes`, and its length.
    fn parse(&self, shape: &Reply, bytes: &[u8]) -> Option<(usize, Result<Reply, String>)> {
        let (line, after) = line(bytes)?;
        let bad = || Err(String::from_utf8_lossy(&line[..line.len().min(80)]).into_owned());
        let text = String::from_utf8_lossy(line);
        let number = |digits: Option<&str>| digits.and_then(|digits| digits.parse::<u64>().ok());
        let reply = match (self.protocol, shape) {
            (Protocol::Redis, Reply::Done) => (text == "+OK").then_some(Reply::Done),
            (Protocol::Redis, Reply::Number(_)) => {
                number(text.strip_prefix(':')).map(Reply::Number)
            }
            (Protocol::Redis, Reply::Text(_)) => {
                let Some(count) = number(text.strip_prefix('$')) else {
                    return Some((after, bad()));
                };
                let (value, after) = counted(bytes, after, count as usize)?;
                return Some((after, Ok(Reply::Text(value))));
            }
            (Protocol::Redis, Reply::Items(_)) => {
                let Some(count) = number(text.strip_prefix('*')) else {
                    return Some((after, bad()));
                };
                return items(bytes, after, count);
            }
            (Protocol::Memcached, Reply::Text(_)) => {
                let Some(count) = number(text.strip_prefix("VALUE ").and_then(last_word)) else {
                    return Some((after, bad()));
                };
                let (value, after) = counted(bytes, after, count as usize)?;
                let (end, more) = self::line(&bytes[after..])?;
                let value = if end == b"END" { Ok(Reply::Text(value)) } else { bad() };
                return Some((after + more, value));
            }
            (Protocol::Memcached, Reply::Number(_)) => number(Some(&text)).map(Reply::Number),
            (Protocol::Memcached, Reply::Done) => (text == "STORED").then_some(Reply::Done),
            (_, Reply::Done) => (text == "OK").then_some(Reply::Done),
            (_, Reply::Number(_)) => number(text.strip_prefix("VALUE ")).map(Reply::Number),
            (_, Reply::Text(_)) => {
                text.strip_prefix("VALUE ").map(|value| Reply::Text(value.to_owned()))
            }
            (_, Reply::Items(_)) => None,
        };
        Some((after, reply.ok_or(()).or_else(|()| bad())))
    }

    fn judge(&mut self, expected: &Expected, found: Result<Reply, String>) -> Result<(), Wrong> {
        if !expected.is_judged {
            return Ok(());
        }
        let words = |found: &str| format!("{} on {}: {found}", expected.what, self.name);
        let found = match found {
            Ok(found) => found,
            Err(said) => return Err(Wrong::Error(words(&format!("the server said {said:?}")))),
        };
        match (&expected.reply, &found) {
            (Reply::Number(most), Reply::Number(found)) => {
                let least = expected.least.unwrap_or(*most);
                if found < &least {
                    let words = words(&format!("{found} where {least} was expected"));
                    return Err(Wrong::Lost(least - found, words));
                }
                if found > most {
                    let words = words(&format!("{found} where {most} was expected"));
                    return Err(Wrong::Duplicate(found - most, words));
                }
                if expected.what == "increment" {
                    self.counted = *found;
                }
                Ok(())
            }
            (expected, found) if expected == found => Ok(()),
            (expected, found) => {
                let (expected, found) = (brief(expected), brief(found));
                let words = words(&format!("{found} where {expected} was expected"));
                match (leading(&found), leading(&expected)) {
                    (Some(found), Some(expected)) if found < expected => {
                        Err(Wrong::Lost(expected - found, words))
                    }
                    _ => Err(Wrong::Error(words)),
                }
            }
        }
    }
}

impl Talk for StoreTalk {
    fn ask(&mut self, out: &mut Vec<u8>) {
        if let Some((key, least, most)) = self.to_look_at.pop() {
            // One more than it had.
            out.extend_from_slice(self.increment_words(&key).as_bytes());
            let (reply, least) = (Reply::Number(most + 1), Some(least + 1));
            let what = "count after a break";
            self.expected.push_back(Expected { what, reply, least, is_judged: true });
            return;
        }
        if self.begin(out) {
            return;
        }
        match (self.dice.below(10), self.register.clone()) {
            (0..=2, _) => self.increment(out),
            (3..=4, _) => self.append(out),
            (5..=7, Some(value)) => self.get(value, out),
            _ => self.set(out),
        }
    }

    fn hear(&mut self, bytes: &[u8]) -> Option<(usize, Result<(), Wrong>)> {
        let expected = self.expected.front()?.clone();
        let (length, found) = self.parse(&expected.reply, bytes)?;
        self.expected.pop_front();
        let judged = self.judge(&expected, found);
        if judged.is_err() {
            self.new_keys();
        }
        Some((length, judged))
    }

    fn begins_anew(&mut self) {
        if !self.expected.is_empty() {
            let is_counted = self.counter > 0;
            if is_counted {
                self.to_look_at.push((self.key('c'), self.counted, self.counter));
            }
            self.new_keys();
            self.expected.clear();
        }
    }
}

/// A line without its end, and where the next one begins.
fn line(bytes: &[u8]) -> Option<(&[u8], usize)> {
    let end = bytes.iter().position(|byte| *byte == b'\n')?;
    let line = &bytes[..end];
    Some((line.strip_suffix(b"\r").unwrap_or(line), end + 1))
}

/// Counted bytes and the CR LF behind them.
fn counted(bytes: &[u8], start: usize, count: usize) -> Option<(String, usize)> {
    let end = start.checked_add(count)?.checked_add(2)?;
    let value = bytes.get(start..end)?;
    Some((String::from_utf8_lossy(&value[..count]).into_owned(), end))
}

fn items(bytes: &[u8], mut at: usize, count: u64) -> Option<(usize, Result<Reply, String>)> {
    let mut found = Vec::new();
    for _ in 0..count {
        let (head, after) = line(&bytes[at..])?;
        let length = String::from_utf8_lossy(head).strip_prefix('$')?.parse::<usize>().ok()?;
        let (item, end) = counted(bytes, at + after, length)?;
        found.push(item.parse().unwrap_or(0));
        at = end;
    }
    Some((at, Ok(Reply::Items(found))))
}

fn last_word(text: &str) -> Option<&str> {
    text.rsplit(' ').next()
}

fn brief(reply: &Reply) -> String {
    match reply {
        Reply::Done => "done".to_owned(),
        Reply::Number(number) => number.to_string(),
        Reply::Text(text) => text.chars().take(40).collect(),
        Reply::Items(items) => format!("{items:?}"),
    }
}

fn leading(text: &str) -> Option<u64> {
    text.split(':').next()?.parse().ok()
}
